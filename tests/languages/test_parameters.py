"""Workers in several languages whose parameters the server holds: each is a loop, and all end with the same ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.testing import Faults, FaultyProxy, ServerProcess, ServerThread
from gradserve.testing.fixtures import (
    gradserve_client,
    gradserve_faults,
    gradserve_network,
    gradserve_process,
    gradserve_server,
)
from gradserve_protocol.codecs import CODECS
from tests.languages.programs import EXAMPLES, built, command
from tests.languages.runs import MANY_WORDS, WORDS, ParametersRun
from tests.servers.polling import PATIENCE_SECONDS

__all__ = ["gradserve_client", "gradserve_faults", "gradserve_network", "gradserve_process", "gradserve_server"]

in_each_language = pytest.mark.parametrize("language", ["javascript", "cpp"])


@pytest.fixture
def run(gradserve_server: ServerThread, tmp_path: Path, name: str) -> Iterator[ParametersRun]:
    with ParametersRun(tmp_path, name, gradserve_server.address) as workers:
        yield workers


def test_five_workers_train_one_model(gradserve_server: ServerThread) -> None:
    for library in ("torch", "jax", "optax"):
        pytest.importorskip(library, reason="not installed: make install-frameworks")
    command("parameters_worker", "javascript")
    built()
    done = subprocess.run(
        [sys.executable, EXAMPLES / "five_workers" / "run.py", gradserve_server.address],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads that spin take the processor from other tests
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = re.findall(
        r"^(\w+): step 40, 40 gradients counted, digest (\w+), (\d+) % of the messages", done.stdout, re.MULTILINE
    )
    assert {worker for worker, *_ in ended} == {"javascript", "cpp", "numpy", "jax", "pytorch"}
    assert {digest for _, digest, _ in ended} == set(re.findall(r"same parameters, digest (\w+)$", done.stdout.strip()))
    assert all(int(percent) > 80 for *_, percent in ended), done.stdout


@in_each_language
@pytest.mark.parametrize(("words", "steps"), [(WORDS, 40), (MANY_WORDS, 4)], ids=["inside of messages", "in streams"])
def test_beside_python(run: ParametersRun, language: str, words: int, steps: int) -> None:
    one = run.start(language, "a", "--words", words, "--steps", steps)
    other = run.start("python", "b", "--words", words, "--steps", steps)
    ended = one.result()
    assert ended == other.result()
    assert (ended.begins_at, ended.step, ended.num_counted) == (0, steps, steps)
    assert len(ended.parameters) == 4 * (words + 1)
    assert any(ended.parameters)


@pytest.mark.parametrize("words", [WORDS, MANY_WORDS], ids=["inside of messages", "in streams"])
def test_packed_gradients(run: ParametersRun, words: int) -> None:
    packed = run.start("javascript", "a", "--words", words, "--steps", 4, "--codec", "int8")
    plain = run.start("python", "b", "--words", words, "--steps", 4)
    ended = packed.result()
    assert ended == plain.result()
    assert (ended.step, ended.num_counted) == (4, 4)
    assert any(ended.parameters)


def test_packed_bytes() -> None:
    script, *_ = command("parameters_worker", "javascript")
    program = """
        const { packInt8 } = require(process.argv[1]);
        const elements = Float32Array.from(JSON.parse(process.argv[2]));
        process.stdout.write(Buffer.from(packInt8({ elements }).elements).toString('hex'));
    """
    random = np.random.default_rng(0)
    for values in (random.normal(size=700), np.zeros(3), np.arange(-127, 128) / 2, random.normal(size=256) * 1e-40):
        arguments = [str(EXAMPLES / "javascript" / "codecs.js"), json.dumps(values.tolist())]
        made = subprocess.run([script, "-e", program, *arguments], capture_output=True, text=True, check=True)
        assert made.stdout == CODECS["int8"].encode(values).tobytes().hex()


@in_each_language
def test_what_is_lost_or_repeated_counts_once(
    run: ParametersRun, gradserve_faults: Faults, gradserve_client: gradserve.Client, language: str
) -> None:
    lost = gradserve_faults.drop_reply("PushPullParameters", times=4)
    repeated = gradserve_faults.duplicate("PushPullParameters", times=4)
    workers = [run.start(language, worker, "--steps", 10) for worker in ("a", "b")]
    first, second = (worker.result() for worker in workers)
    assert first == second
    assert (first.step, first.num_counted) == (10, 10)
    assert len(lost.happened) == len(repeated.happened) == 4
    (info,) = [each for each in gradserve_client.list_parameters() if each.name == run.name]
    assert (info.weights.accepted, info.weights.applied) == (20.0, 20.0)


@in_each_language
def test_a_worker_that_was_away_reads_the_newest_version(
    run: ParametersRun, gradserve_network: FaultyProxy, gradserve_client: gradserve.Client, language: str
) -> None:
    """Its gradient was in the first round, or it is stale; then it goes on like the others."""
    away = run.start(language, "away", "--steps", 20, address=gradserve_network.address)
    run.wait_until(gradserve_client, 0, 1)
    gradserve_network.partition()
    stays = run.start("python", "stays", "--steps", 20)
    run.start(language, "ends", "--steps", 12).result()
    run.wait_until(gradserve_client, 12, 1)
    gradserve_network.heal()
    ended = away.result()
    assert ended.parameters == stays.result().parameters
    assert ended.num_counted in {8, 9}


@in_each_language
def test_a_worker_that_joins_late(run: ParametersRun, gradserve_client: gradserve.Client, language: str) -> None:
    """Nobody answers it but the server: the others may be gone."""
    for worker in [run.start("python", each, "--steps", 3) for each in ("a", "b")]:
        worker.result()
    ended, other = (each.result() for each in [run.start(language, worker, "--steps", 8) for worker in ("c", "d")])
    assert (ended.begins_at, ended.num_counted) == (3, 5)
    assert ended.parameters == other.parameters


@in_each_language
def test_a_worker_that_is_started_again_counts_once(
    run: ParametersRun, gradserve_client: gradserve.Client, language: str
) -> None:
    killed = run.start(language, "a", "--steps", 3)
    run.wait_until(gradserve_client, 0, 1)
    killed.kill()
    run.wait_until_waiting(gradserve_client, 0)
    again = run.start(language, "a", "--steps", 3)
    run.wait_until_waiting(gradserve_client, 1)  # otherwise the round could end before it has begun
    other = run.start("python", "b", "--steps", 3)
    assert again.result() == other.result()


@in_each_language
def test_a_server_that_is_killed_and_started_again(
    gradserve_process: ServerProcess, tmp_path: Path, name: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with ParametersRun(tmp_path, name, gradserve_process.address) as run:
        stays = run.start(language, "stays", "--steps", 8)
        run.start(language, "ends", "--steps", 3).result()
        with gradserve.connect(run.address, timeout=PATIENCE_SECONDS) as client:
            run.wait_until(client, 3, 1)
        gradserve_process.kill()
        gradserve_process.restart()
        late = run.start("python", "late", "--steps", 8)
        assert late.result().parameters == stays.result().parameters


@in_each_language
def test_another_model_is_an_error_that_says_what_differs(run: ParametersRun, language: str) -> None:
    run.start("python", "a", "--words", 40)
    run.start(language, "b", "--words", 40, "--steps", 1).result()
    assert "shape" in run.start(language, "c", "--words", 41).failure()
