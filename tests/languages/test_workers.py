"""Workers in other languages train beside Python's, and end with the same parameters."""

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
from tests.languages.runs import MANY_WORDS, WORDS, WordsRun
from tests.security.serving import TOKENS, entry
from tests.servers.certificates import make_certificates
from tests.servers.polling import PATIENCE_SECONDS

__all__ = ["gradserve_client", "gradserve_faults", "gradserve_network", "gradserve_process", "gradserve_server"]

in_each_language = pytest.mark.parametrize("language", ["javascript", "cpp"])


@pytest.fixture
def run(gradserve_server: ServerThread, tmp_path: Path, name: str) -> Iterator[WordsRun]:
    with WordsRun(tmp_path, name, gradserve_server.address) as workers:
        yield workers


@in_each_language
@pytest.mark.parametrize(("words", "steps"), [(WORDS, 40), (MANY_WORDS, 4)], ids=["inside of messages", "in streams"])
def test_beside_python(run: WordsRun, language: str, words: int, steps: int) -> None:
    one = run.start(language, "a", "--words", words, "--steps", steps)
    other = run.start("python", "b", "--words", words, "--steps", steps)
    ended = one.result()
    assert ended == other.result()
    assert (ended.begins_at, ended.step, ended.num_counted) == (0, steps, steps)
    assert len(ended.parameters) == 4 * (words + 1)
    assert any(ended.parameters)


@in_each_language
def test_what_is_lost_or_repeated_counts_once(run: WordsRun, gradserve_faults: Faults, language: str) -> None:
    lost = gradserve_faults.drop_reply("PushPull", times=4)
    repeated = gradserve_faults.duplicate("PushPull", times=4)
    workers = [run.start(language, worker, "--steps", 10) for worker in ("a", "b")]
    first, second = (worker.result() for worker in workers)
    assert first == second
    assert (first.step, first.num_counted) == (10, 10)
    assert len(lost.happened) == len(repeated.happened) == 4


@in_each_language
def test_an_upload_whose_reply_is_lost_is_sent_again(run: WordsRun, gradserve_faults: Faults, language: str) -> None:
    lost = gradserve_faults.drop_reply("PutTensors", times=2)
    workers = [run.start(language, worker, "--words", MANY_WORDS, "--steps", 2) for worker in ("a", "b")]
    first, second = (worker.result() for worker in workers)
    assert first == second
    assert first.num_counted == 2
    assert len(lost.happened) == 2


@in_each_language
@pytest.mark.parametrize("step", [5, 12], ids=["reads the averages", "takes over the state"])
def test_a_worker_that_was_away(
    run: WordsRun, gradserve_network: FaultyProxy, gradserve_client: gradserve.Client, language: str, step: int
) -> None:
    """Its gradient is stale; of the averages, eight are kept."""
    away = run.start(language, "away", "--steps", 20, address=gradserve_network.address)
    run.wait_until(gradserve_client, 0, 1)
    gradserve_network.partition()
    stays = run.start("python", "stays", "--steps", 20)
    run.start(language, "ends", "--steps", step).result()
    run.wait_until(gradserve_client, step, 1)
    gradserve_network.heal()
    ended = away.result()
    assert ended.parameters == stays.result().parameters
    assert ended.num_counted == 1 + 20 - step  # its first one was in the first round


@in_each_language
@pytest.mark.parametrize("joins", ["python", "other"])
def test_a_worker_that_joins_late(run: WordsRun, gradserve_client: gradserve.Client, language: str, joins: str) -> None:
    """The only other worker left waits for it. Somebody has made the accumulators, in another order."""
    step, bias, weights = np.zeros(()), np.zeros((), np.float32), np.zeros(WORDS, np.float32)
    parameters = {"bias": bias, "weights": weights}
    gradserve_client.gradient_accumulator(parameters, run.name, keep_averages=8, idle_lease=3600)
    gradserve_client.gradient_accumulator(parameters, f"{run.name}/initial", idle_lease=3600)
    gradserve_client.gradient_accumulator({"step": step, **parameters}, f"{run.name}/state", idle_lease=3600)
    late, stays = ("python", language) if joins == "python" else (language, "python")
    remaining = run.start(stays, "stays", "--steps", 8)
    run.start(language, "ends", "--steps", 3).result()
    run.wait_until(gradserve_client, 3, 1)
    ended = run.start(late, "late", "--steps", 8).result()
    assert (ended.begins_at, ended.num_counted) == (3, 5)
    assert ended.parameters == remaining.result().parameters


@in_each_language
def test_a_worker_that_is_started_again_counts_once(
    run: WordsRun, gradserve_client: gradserve.Client, language: str
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
    with WordsRun(tmp_path, name, gradserve_process.address) as run:
        stays = run.start(language, "stays", "--steps", 8)
        run.start(language, "ends", "--steps", 3).result()
        with gradserve.connect(run.address, timeout=PATIENCE_SECONDS) as client:
            run.wait_until(client, 3, 1)
        gradserve_process.kill()
        gradserve_process.restart()
        late = run.start("python", "late", "--steps", 8)
        assert late.result().parameters == stays.result().parameters


@in_each_language
def test_with_tls_and_a_token(tmp_path: Path, name: str, language: str) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    access = tmp_path / "access.toml"
    access.write_text(
        entry("chief", {"*": "chief"}, TOKENS["chief"]) + entry("worker", {"*": "worker"}, TOKENS["worker"])
    )
    with (
        ServerThread(
            tls_certificate=str(certificates.folder / "server.pem"),
            tls_key=str(certificates.folder / "server.key"),
            access=str(access),
        ) as server,
        WordsRun(tmp_path, name, server.address.replace("127.0.0.1", "localhost")) as run,
        gradserve.connect(server.address, tls=certificates.client(), token=TOKENS["chief"]) as client,
    ):
        ca = str(certificates.ca)
        chief = run.start(language, "a", "--steps", 3, GRADSERVE_TLS_CA=ca, GRADSERVE_TOKEN=TOKENS["chief"])
        run.wait_until(client, 0, 1)
        worker = run.start(language, "b", "--steps", 3, GRADSERVE_TLS_CA=ca, GRADSERVE_TOKEN=TOKENS["worker"])
        assert chief.result() == worker.result()
        stranger = run.start(language, "c", GRADSERVE_TLS_CA=ca, GRADSERVE_TOKEN="gradserve_unknown")
        assert "token" in stranger.failure()


@in_each_language
def test_another_model_is_an_error_that_says_what_differs(run: WordsRun, language: str) -> None:
    run.start("python", "a", "--words", 40)
    run.start(language, "b", "--words", 40, "--steps", 1).result()
    assert "shape" in run.start(language, "c", "--words", 41).failure()
