"""Workers go on by themselves after a restart of the server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import gradserve
from gradserve.calls.retries import RetryPolicy
from gradserve.testing import ServerProcess
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.training.replicas import SIZE, Replica, have_equal_weights, training, waits_for_its_round

WITH_AND_WITHOUT_STATE = pytest.mark.parametrize(
    "restartable",
    [
        pytest.param("", id="without a state directory"),
        pytest.param("--state-dir", id="with one", marks=pytest.mark.exhaustive),
    ],
    indirect=True,
)


class Restartable(NamedTuple):
    """A server in a process of its own, and two clients, which wait for it."""

    server: ServerProcess
    client: gradserve.Client
    other_client: gradserve.Client


@pytest.fixture
def restartable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Restartable]:
    """The parameter is the flag for a state directory; without one, the server has none."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    flag = getattr(request, "param", "")
    with (
        ServerProcess(tmp_path, "--warm-up", "false", *((flag, str(tmp_path / "state")) if flag else ())) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
    ):
        yield Restartable(server, client, other_client)


@WITH_AND_WITHOUT_STATE
def test_between_two_steps(
    restartable: Restartable,
    name: str,
    threads: ThreadPoolExecutor,
) -> None:
    server, client, other_client = restartable
    one = Replica(client, name, "one", 2).begin()
    two = Replica(other_client, name, "two", 2).begin()
    for turn in range(4):
        for step in [threads.submit(each.train) for each in (one, two)]:
            step.result()
        assert have_equal_weights(one, two)
        assert one.step == turn + 1
        if turn == 1:
            server.kill()
            server.restart()
    one.worker.close()
    two.worker.close()


@WITH_AND_WITHOUT_STATE
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("num_joined", [1, 0], ids=["a worker has joined before", "nobody has joined before"])
def test_before_others_join_and_all_end(restartable: Restartable, name: str, num_joined: int) -> None:
    """What it has lost of earlier answers stops neither the end of a block nor those who join later."""
    server, client, other_client = restartable
    with Replica(client, name, "a", 1).begin() as first:
        first.train()
        for number in range(num_joined):
            with Replica(other_client, name, f"b-{number}", 1) as joined, training(first):
                joined.begin()
                assert joined.num_loaded == 1
        server.kill()
        server.restart()
        first.train()
        with Replica(other_client, name, "c", 1) as late, training(first):
            late.begin()
            assert late.num_loaded == 1
        first.train()
    with Replica(other_client, name, "d", 1).begin() as last:
        assert have_equal_weights(first, last)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["the one behind", "the one ahead"])
def test_that_loses_the_rounds_between_two_workers(restartable: Restartable, name: str, first: str) -> None:
    """Nobody knows the average between their steps any more: one of them has to take the other's parameters."""
    server, client, other_client = restartable
    # One of them takes steps by itself below, some before it notices that it is to stop: all of these are kept.
    ahead, behind = (
        Replica(each, name, worker_id, 1, keep_averages=256).begin()
        for each, worker_id in ((client, "a"), (other_client, "b"))
    )
    loaded = ahead.num_loaded + behind.num_loaded
    ahead.train()
    behind.train()
    ahead.train()
    assert (ahead.step, behind.step) == (2, 1)
    server.kill()
    server.restart()
    one, other = (behind, ahead) if first == "the one behind" else (ahead, behind)
    one.train()
    with training(one):
        other.train()
    ahead.train()
    behind.train()
    if ahead.step > behind.step:
        behind.train()
    if behind.step > ahead.step:
        ahead.train()
    assert have_equal_weights(ahead, behind)
    assert ahead.num_loaded + behind.num_loaded > loaded
    for each in (ahead, behind):
        each.worker.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_newcomer_first", [False, True])
def test_before_the_first_round(
    restartable: Restartable,
    name: str,
    threads: ThreadPoolExecutor,
    is_newcomer_first: bool,
) -> None:
    """Those who have begun, and one that begins afterwards, have the same parameters."""
    server, client, other_client = restartable
    early = Replica(client, name, "early", 2).begin()
    run = early.worker._run.id
    server.kill()
    server.restart()
    if is_newcomer_first:
        late = Replica(other_client, name, "late", 2).begin()
        assert early.train().state is not None
        waiting = waits_for_its_round(early, threads)
    else:
        waiting = threads.submit(early.train)
        eventually(lambda: early.worker._run.id != run and early.worker.accumulator.num_accumulated())
        late = Replica(other_client, name, "late", 2).begin()
    late.train()
    waiting.result()
    assert have_equal_weights(early, late)
    for each in (early, late):
        each.worker.close()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_with_a_newcomer_before_those_who_were_there(
    restartable: Restartable, name: str, threads: ThreadPoolExecutor, num_steps: int
) -> None:
    """Its gradient of the parameters with which it began does not count among gradients of later ones."""
    server, client, other_client = restartable
    one = Replica(client, name, "one", 2).begin()
    two = Replica(other_client, name, "two", 2).begin()
    for _ in range(num_steps):
        for step in [threads.submit(each.train) for each in (one, two)]:
            step.result()
    server.kill()
    server.restart()
    newcomer = Replica(other_client, name, "newcomer", 2).begin()
    assert newcomer.step == 0
    coming = waits_for_its_round(newcomer, threads)
    waiting = [threads.submit(each.train, np.full(SIZE, 3, np.float32)) for each in (one, two)]
    (average,), (again,) = (each.result().averages for each in waiting)
    assert average["w"].tolist() == again["w"].tolist() == [3] * SIZE
    resting = threads.submit(one.train)
    assert coming.result().state is not None
    if newcomer.step < one.step:
        newcomer.train()  # it was given the state from before the others' last round, whose average is kept
    newcomer.train()
    resting.result()
    two.train()
    assert have_equal_weights(one, two, newcomer)
    for each in (one, two, newcomer):
        each.worker.close()


@pytest.mark.exhaustive
def test_that_another_thread_of_the_worker_sees_first(restartable: Restartable, name: str) -> None:
    """The thread that looks for joiners asks for the accumulator, too: that takes nothing from the training."""
    server, client, _ = restartable
    replica = Replica(client, name, "one", 1).begin()
    replica.train()
    server.kill()
    server.restart()
    for _ in range(2):
        with pytest.raises(gradserve.LostError, match="its step, 1"):
            replica.worker.accumulator.info()
    assert replica.train().step == 2
    replica.worker.close()


@pytest.mark.parametrize("restartable", ["--state-dir"], indirect=True)
def test_while_a_worker_waits_for_a_state(restartable: Restartable, name: str, threads: ThreadPoolExecutor) -> None:
    server, client, other_client = restartable
    with Replica(client, name, "a", 1).begin() as first:
        first.train()
        joining = threads.submit(Replica(other_client, name, "b", 1).begin)
        eventually(first.worker._run.joining.requesters)
        server.kill()
        server.restart()
        with training(first):
            assert joining.result().num_loaded == 1
    joining.result().worker.close()


@pytest.mark.exhaustive
def test_they_wait_for_it_as_long_as_for_others(
    tmp_path: Path, name: str, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls of the client give up as soon as the server is gone."""
    impatient = RetryPolicy(pauses=(), restart_patience=0.1, restart_pause=0.1)
    monkeypatch.setattr(RetryPolicy, "wanted", lambda _environment: impatient)
    with (
        ServerProcess(tmp_path) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        replica = Replica(client, name, "one", 1).begin()
        replica.train()
        server.kill()
        with pytest.raises(gradserve.UnavailableError):
            client.server_info()
        waiting = threads.submit(replica.train)
        for _ in range(3):
            with pytest.raises(gradserve.UnavailableError):
                client.server_info()
        assert not waiting.done()
        server.restart()
        assert waiting.result().step == 2
        replica.worker.close()
