"""Workers in several languages whose parameters the server holds: each is a loop, and all end with the same ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from tests.codecs.data.make_vectors import VECTORS, value_of
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


@in_each_language
@pytest.mark.parametrize("inline_limit", ["1MiB", "8B"], ids=["inside of messages", "in streams"])
def test_packed_gradients(tmp_path: Path, name: str, language: str, inline_limit: str) -> None:
    """They lead to about the same parameters as plain ones, which a worker that ignores the codec would match."""
    with (
        ServerThread(inline_limit_bytes=inline_limit) as server,
        ParametersRun(tmp_path, name, server.address) as run,
        ParametersRun(tmp_path, f"{name}-plain", server.address) as other,
        gradserve.connect(server.address) as client,
    ):
        alone = ("--required", 1, "--steps", 8)
        packed = run.start(language, "a", *alone, "--codec", "int8").result()
        calls = {each.method: each.handled.get("OK", 0) for each in client.server_status().methods}
        assert calls["PushPullParameters"] == 8
        assert calls.get("PutTensors", 0) == (0 if inline_limit == "1MiB" else 1 + 8)
        plain = other.start(language, "a", *alone).result()
    assert (packed.step, packed.num_counted) == (8, 8)
    difference = np.frombuffer(packed.parameters, np.float32) - np.frombuffer(plain.parameters, np.float32)
    assert 0 < np.abs(difference).max() < 0.05


@in_each_language
def test_an_unknown_codec(run: ParametersRun, language: str) -> None:
    assert "int8, got int4" in run.start(language, "a", "--codec", "int4").failure()


@in_each_language
def test_packed_bytes(language: str, tmp_path: Path) -> None:
    """The bytes of a plain reading of codecs.proto, also for values that are halfway, very small, or 0."""
    random = np.random.default_rng(0)
    made = packer(language, tmp_path)
    recorded = [each for each in json.loads(VECTORS.read_text(encoding="utf-8")) if each["codec"] == "int8"]
    assert recorded
    for each in recorded:
        assert made(np.array([value_of(index) for index in range(each["size"])])) == each["packed"]
    for values in (random.normal(size=700), np.zeros(3), np.arange(-127, 128) / 2, random.normal(size=256) * 1e-40):
        assert made(values) == CODECS["int8"].encode(values).tobytes().hex()
    for wrong in ("NaN", "Infinity"):
        with pytest.raises(subprocess.CalledProcessError) as failure:
            made(np.array([1.0, float(wrong)]))
        assert "expected finite values, which int8 can represent" in failure.value.stderr


def packer(language: str, folder: Path) -> Callable[[np.ndarray], str]:
    """Returns what packs values with the int8 of a language's examples, and returns the bytes as hexadecimal digits."""
    if language == "javascript":
        script, *_ = command("parameters_worker", "javascript")
        program = """
            const { packInt8 } = require(process.argv[1]);
            const text = require('node:fs').readFileSync(0, 'utf8');
            const elements = Float32Array.from(text.split(' '), (word) => Number(word.replace('inf', 'Infinity')));
            process.stdout.write(Buffer.from(packInt8({ elements }).elements).toString('hex'));
        """
        arguments = [str(script), "-e", program, str(EXAMPLES / "javascript" / "codecs.js")]
    else:
        built()
        source = folder / "pack.cpp"
        source.write_text(CPP_PACKER, encoding="utf-8")
        arguments = [str(folder / "pack")]
        subprocess.run(["g++", "-std=c++17", "-I", EXAMPLES / "cpp", "-o", arguments[0], source], check=True)

    def pack(values: np.ndarray) -> str:
        text = " ".join(map(str, values.tolist()))
        return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout

    return pack


CPP_PACKER = """
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "codecs.h"

int main() try {
  std::vector<double> elements;
  for (std::string word; std::cin >> word;) {
    elements.push_back(std::strtod(word.c_str(), nullptr));
  }
  for (const auto byte : example::PackInt8(elements)) {
    std::printf("%02x", byte);
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
"""


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
