"""Servers that are started again, of those that share an accumulator."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import gradserve
from gradserve import STALE
from gradserve.calls.accumulators.sharding import wire
from gradserve_protocol.placement import home_of
from gradserve_server.config.servers import ClusterConfig
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import MODEL, WAYS, gradient, same, shards_of, small_pieces
from tests.cluster.sharding.stages import Stage, stopping_client
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer

HOME, OTHER = 0, 1
Start = Callable[[Path | None], list[RestartingServer]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts two servers, with state directories in a folder."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with ExitStack() as stack, small_pieces():

        def started(folder: Path | None) -> list[RestartingServer]:
            places = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
            states = [None if folder is None else folder / str(index) for index in range(2)]
            return [
                stack.enter_context(RestartingServer(state, place)) for state, place in zip(states, places, strict=True)
            ]

        yield started


@pytest.fixture
def forgetful(start: Start) -> list[RestartingServer]:
    return start(None)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.05)


def _addresses(servers: list[RestartingServer]) -> list[str]:
    return [each.address for each in servers]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("way", WAYS)
def test_workers_that_wait_send_again_what_a_server_has_lost(forgetful: list[RestartingServer], way: str) -> None:
    name = name_at(HOME, 2)
    with (
        ThreadPoolExecutor(2) as threads,
        gradserve.connect(_addresses(forgetful), transport=way) as one,  # type: ignore[arg-type]
        gradserve.connect(_addresses(forgetful)) as two,
    ):
        first, second = (client.gradient_accumulator(MODEL, name, sharded=True) for client in (one, two))
        for step in range(3):
            waits = threads.submit(first.push_pull, gradient(1), 2, step)
            eventually(lambda: second.num_accumulated() == 1)
            forgetful[OTHER].restart()
            for pulled in (second.push_pull(gradient(3), 2, step), waits.result()):
                for component in ("kernel", "bias"):
                    same(pulled[component], gradient(2)[component])


@pytest.mark.usefixtures("impatient")
def test_what_nobody_sends_again_is_named(forgetful: list[RestartingServer]) -> None:
    """And the next round is whole."""
    name = name_at(HOME, 2)
    with gradserve.connect(_addresses(forgetful)) as client:
        net = client.gradient_accumulator(MODEL, name, sharded=True)
        net.apply_grad(gradient(1), 0, worker_id="a")
        forgetful[OTHER].restart()
        expected = (
            rf"^server 1 of the cluster has lost gradients of round 1 of accumulator 'default/{name}', and not all of "
            r"them were sent again: there is no average of this round. Go on with the next one, with local_step=1 "
            r"\[GS_SHARD_LOST\]$"
        )
        for call in (
            lambda: net.push_pull(gradient(1), 2, 0, worker_id="b"),
            net.read_average,
        ):
            with pytest.raises(gradserve.AbortedError, match=expected) as lost:
                call()
            assert lost.value.field == "average.parts.part_ids"
        stale = net.push_pull(gradient(1), 1, 0, worker_id="b", on_stale="return")
        assert (stale.outcome, dict(stale), stale.global_step) == (STALE, {}, 1)
        same(net.push_pull(gradient(5), 1, 1)["kernel"], gradient(5)["kernel"])
        same(net.read_average()["kernel"], gradient(5)["kernel"])


@pytest.mark.usefixtures("impatient")
def test_a_take_of_what_is_lost(forgetful: list[RestartingServer]) -> None:
    with gradserve.connect(_addresses(forgetful)) as client:
        net = client.gradient_accumulator(MODEL, sharded=True)  # private
        home = home_of("", net.name, 2)
        net.apply_grad(gradient(1), 0)
        forgetful[1 - home].restart()
        with pytest.raises(gradserve.AbortedError, match=f"server {1 - home} of the cluster has lost") as lost:
            net.take_grad(1)
        assert lost.value.request_id is not None
        net.apply_grad(gradient(2), 1)
        same(net.take_grad(1)["kernel"], gradient(2)["kernel"])


def test_between_rounds_nobody_notices(forgetful: list[RestartingServer]) -> None:
    with gradserve.connect(_addresses(forgetful)) as client:
        net = client.gradient_accumulator(MODEL, name_at(HOME, 2), sharded=True)
        for step in range(3):
            same(net.push_pull(gradient(step), 1, step)["kernel"], gradient(step)["kernel"])
            assert net.info().num_bytes > 0
            forgetful[OTHER].restart()
            assert net.info().global_step == step + 1


def test_deletion_by_name_begins_at_the_home(forgetful: list[RestartingServer]) -> None:
    """If it cannot go on, nothing is left that names gradients which others have deleted."""
    name = name_at(OTHER, 2)  # the second of the list
    stage = Stage(["DeleteAccumulator"], 1)
    client, transport = stopping_client(_addresses(forgetful), stage)
    left: list[bool] = []
    with client:
        client.gradient_accumulator(MODEL, name, sharded=True)
        transport.happen = lambda: left.extend(shards_of(name, [each.run for each in forgetful]))
        assert client.delete_accumulator(name)
    assert left == [True, False]


def test_what_was_deleted_is_not_made_again(forgetful: list[RestartingServer]) -> None:
    name = name_at(HOME, 2)
    with gradserve.connect(_addresses(forgetful)) as client, gradserve.connect(_addresses(forgetful)) as other:
        net = client.gradient_accumulator(MODEL, name, sharded=True)
        assert other.delete_accumulator(name)
        with pytest.raises(gradserve.NotFoundError):
            net.push_pull(gradient(1), 1)
    for each in forgetful:
        with gradserve.connect(each.address) as one:
            assert one.list_accumulators() == []


@pytest.mark.sampled
@pytest.mark.parametrize("restarted", [(HOME,), (OTHER,), (HOME, OTHER)])
@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_nothing_is_lost_with_state_directories(
    start: Start, tmp_path: Path, durability: str, restarted: tuple[int, ...]
) -> None:
    servers = start(tmp_path)
    with gradserve.connect(_addresses(servers)) as client:
        net = client.gradient_accumulator(MODEL, name_at(HOME, 2), sharded=True, durability=durability)
        for step in range(2):
            net.apply_grad(gradient(1), step, worker_id="a")
            for index in restarted:
                servers[index].restart()
            net.apply_grad(gradient(3), step, worker_id="b")
            for index in restarted:
                servers[index].restart()
            taken = net.take_grad(2)
            for component in ("kernel", "bias"):
                same(taken[component], gradient(2)[component])
            assert taken.step == step + 1


def test_a_home_that_forgets_everything(forgetful: list[RestartingServer]) -> None:
    name = name_at(HOME, 2)
    with ThreadPoolExecutor(1) as threads, gradserve.connect(_addresses(forgetful)) as client:
        net = client.gradient_accumulator(MODEL, name, sharded=True)
        waits = threads.submit(net.push_pull, gradient(1), 2, 0, worker_id="a")
        eventually(lambda: net.num_accumulated() == 1)
        forgetful[HOME].restart()  # nothing that this client was told is lost: its gradient is sent to the new one
        for pulled in (net.push_pull(gradient(3), 2, 0, worker_id="b"), waits.result()):
            same(pulled["kernel"], gradient(2)["kernel"])
        forgetful[HOME].restart()
        with pytest.raises(gradserve.LostError, match="whose durability is none: its step, 1"):
            net.push_pull(gradient(3), 1, 1)
        assert net.info().global_step == 0
        same(net.push_pull(gradient(4), 1, 0)["kernel"], gradient(4)["kernel"])
