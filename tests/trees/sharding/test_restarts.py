"""Every gradient counts once, at whichever stage the aggregator ends, and whichever server is started again."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.upstream import shards
from gradserve_testing import LocalServer
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import RestartingAggregator, aggregator
from tests.trees.sharding.stages import Gate
from tests.trees.workers import at_once, clients_of

HOME, OTHER = 1, 0
NAME = name_at(HOME, 2)
PLACES = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
WEIGHTS = (0.5, 3.0, 1.25)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with small_pieces():
        yield


def gradient(seed: int) -> dict[str, Any]:
    values = np.random.default_rng(seed).standard_normal((7, 3))
    return {"kernel": values.astype(np.float16), "bias": values[0]}


def push_pull(acc: Any, at: int, num_required: int, step: int) -> Any:
    return acc.push_pull(gradient(at), num_required, step, weight=WEIGHTS[at], worker_id=f"w{at}")


def check(average: Any, *seeds: int) -> None:
    """Checks that an average is the weighted mean of some gradients."""
    weights = [WEIGHTS[seed] for seed in seeds]
    assert (average.num_gradients, average.total_weight) == (len(seeds), reduce(add, weights))
    for name in gradient(0):
        terms = [gradient(seed)[name].astype(np.float64) for seed in seeds]
        expected = np.average(terms, axis=0, weights=weights)
        np.testing.assert_allclose(average[name].astype(np.float64), expected, rtol=2**-10, atol=2**-12)


STAGES: dict[str, tuple[Collection[str], int]] = {
    "before staging": (["StageGradient"], 0),
    "staged on some": (["StageGradient"], 1),
    "staged on all, and the answer lost": (["StageGradient"], 2),
    "staged on all": (["ApplyGradient", "PushPull"], 0),
    "accepted, and the answer lost": (["ApplyGradient"], 1),
    "decided, and the answer lost": (["PushPull", "TakeGradient"], 1),
    "reduced by some": (["ReduceGradients"], 1),
    "reduced by all, and the answer lost": (["ReduceGradients"], 2),
}


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def addresses(gate: Gate) -> Iterator[list[str]]:
    servers = [
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=place), Parts(interceptors=(gate,))) for place in PLACES
    ]
    with servers[0], servers[1]:
        yield [each.address for each in servers]


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (stage, kind)
        for stage in STAGES
        for kind in ("push_pull", "apply and take")
        if kind != "push_pull" or not stage.startswith("accepted")  # it is not answered before its round has ended
    ],
)
def test_an_aggregator_that_ends_at_any_stage(
    addresses: list[str], gate: Gate, name: str, stage: str, kind: str
) -> None:
    """Whatever of its calls comes late, and whichever of them have been carried out."""
    near = RestartingAggregator(",".join(addresses))
    near.run.__enter__()
    try:
        with gradserve.connect(addresses) as client, clients_of(near.run.address, 2) as clients:
            direct = client.gradient_accumulator(gradient(0), name, sharded=True)
            made = [each.gradient_accumulator(gradient(0), name, sharded=True) for each in clients]
            direct.apply_grad(gradient(2), weight=WEIGHTS[2], worker_id="w2")
            gate.close(*STAGES[stage])
            with ThreadPoolExecutor(2) as threads:
                calls = [threads.submit(averaged, made[at], at, kind) for at in range(2)]
                assert gate.has_come.wait(PATIENCE_SECONDS)
                near.restart()
                gate.open()
                for each in calls:
                    check(each.result(), 0, 1, 2)
            assert (direct.num_accumulated(), direct.info().global_step) == (0, 1)
            check(direct.read_average(1), 0, 1, 2)
            for each in at_once(lambda acc, at: push_pull(acc, at, 2, 1), made, range(2)):
                check(each, 0, 1)
    finally:
        near.run.__exit__()


def averaged(acc: Any, at: int, kind: str) -> Any:
    """Returns the average of the three gradients, one of which is here."""
    if kind == "push_pull":
        return push_pull(acc, at, 3, 0)
    acc.apply_grad(gradient(at), 0, weight=WEIGHTS[at], worker_id=f"w{at}")
    return acc.read_average(1) if at else acc.take_grad(3)


class Servers:
    """Two servers that can be started again, an aggregator, two workers there, and a client of the servers."""

    def __init__(self, servers: list[RestartingServer], made: list[Any], direct: Any) -> None:
        self.servers = servers
        self.made = made
        self.direct = direct


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """Without state directories, or with a durability."""
    durability = getattr(request, "param", None)
    folders = [None if durability is None else tmp_path / str(place.cluster_index) for place in PLACES]
    servers = [RestartingServer(*each) for each in zip(folders, PLACES, strict=True)]
    with servers[0], servers[1]:
        addresses = [each.address for each in servers]
        with (
            aggregator(",".join(addresses), 2, 1.0) as near,
            clients_of(near.address, 2) as clients,
            gradserve.connect(addresses) as client,
        ):
            made = [
                each.gradient_accumulator(gradient(0), NAME, sharded=True, durability=durability)
                for each in (*clients, client)
            ]
            yield Servers(servers, made[:2], made[2])


def test_workers_that_wait_send_again_what_a_server_has_lost(started: Servers) -> None:
    """Their aggregator has their sum, and sends it again."""
    with ThreadPoolExecutor(2) as threads:
        for step in range(2):
            calls = [threads.submit(push_pull, started.made[at], at, 3, step) for at in range(2)]
            eventually(started.direct.num_accumulated, (2).__eq__)
            started.servers[OTHER].restart()
            check(push_pull(started.direct, 2, 3, step), 0, 1, 2)
            for each in calls:
                check(each.result(), 0, 1, 2)


def test_what_nobody_sends_again_is_named(started: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PATIENCE_SECONDS", 0.05)
    at_once(lambda acc, at: acc.apply_grad(gradient(at)), started.made, range(2))
    started.servers[OTHER].restart()
    with pytest.raises(gradserve.AbortedError, match=r"has lost gradients of round 1 .* with local_step=1") as lost:
        started.made[0].take_grad(2)
    assert lost.value.field == "average.parts.part_ids"
    stale = started.made[1].push_pull(gradient(0), 1, 0, on_stale="return", worker_id="late")
    assert (stale.outcome, dict(stale), stale.global_step) == (gradserve.STALE, {}, 1)
    for each in at_once(lambda acc, at: push_pull(acc, at, 2, 1), started.made, range(2)):
        check(each, 0, 1)


def test_a_home_that_has_lost_the_accumulator(started: Servers) -> None:
    """Workers learn of it as without an aggregator, and it is created again, with the same parts."""
    at_once(lambda acc, at: push_pull(acc, at, 2, 0), started.made, range(2))
    started.servers[HOME].restart()
    for acc in started.made:
        with pytest.raises(gradserve.LostError, match="has lost accumulator"):
            acc.num_accumulated()
    for each in at_once(lambda acc, at: push_pull(acc, at, 2, 0), started.made, range(2)):
        check(each, 0, 1)
        assert each.step == 1
    assert started.made[0].info().num_shards == 2


@pytest.mark.parametrize("started", ["round", "gradient"], indirect=True)
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
def test_nothing_acknowledged_is_lost(started: Servers, lost: int) -> None:
    """It is on disk, or the workers send it again, as their level says."""
    at_once(
        lambda acc, at: acc.apply_grad(gradient(at), 0, weight=WEIGHTS[at], worker_id=f"w{at}"),
        started.made,
        range(2),
    )
    started.servers[lost].restart()
    at_once(lambda acc: acc.num_accumulated(), started.made)  # each learns of the restart by its next call
    check(started.made[0].take_grad(2), 0, 1)
    started.servers[lost].restart()
    check(started.made[1].read_average(1), 0, 1)
    for each in at_once(lambda acc, at: push_pull(acc, at, 2, 1), started.made, range(2)):
        check(each, 0, 1)


@pytest.mark.parametrize("started", ["round", "gradient"], indirect=True)
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
def test_calls_that_wait_go_on(started: Servers, lost: int) -> None:
    """At the server that is back, with the gradients that it had."""
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(push_pull, started.made[at], at, 3, 0) for at in range(2)]
        eventually(started.direct.num_accumulated, (2).__eq__)
        started.servers[lost].restart()
        eventually(started.direct.num_accumulated, (2).__eq__)
        check(push_pull(started.direct, 2, 3, 0), 0, 1, 2)
        for each in calls:
            check(each.result(), 0, 1, 2)
    assert started.direct.info().global_step == 1
