"""Every update of sharded parameters counts once, at whichever stage an aggregator ends, or a server starts again."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import codecs
from gradserve_protocol.arrays import BFLOAT16
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import RestartingAggregator, aggregator, running_tree_on
from tests.trees.sharding.stages import Gate
from tests.trees.workers import at_once, clients_of

HOME, OTHER = 1, 0
NAME = name_at(HOME, 2)
PLACES = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
VALUES = {"w": np.zeros((7, 3), np.float32), "b": np.zeros(3, np.float16)}
WEIGHTS = (1.0, 2.0, 5.0)
NUMBERS = (1.0, 2.0, 7.0)
MEAN = 5.0
"""That of the numbers, by the weights."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with small_pieces():
        yield


def update(number: float) -> dict[str, Any]:
    return {name: np.full_like(value, number) for name, value in VALUES.items()}


def made_by(client: gradserve.Client, name: str, num_required: int = 3, **how: Any) -> gradserve.Parameters:
    return client.parameters(VALUES, name, sharded=True, num_required=num_required, **how)


def push(made: gradserve.Parameters, at: int, step: int = 0, **how: Any) -> gradserve.PushResult:
    return made.push(update(NUMBERS[at]), step, weight=WEIGHTS[at], worker_id=f"w{at}", **how)


def push_pull(made: gradserve.Parameters, at: int, step: int = 0) -> gradserve.PushPull:
    return made.push_pull(update(NUMBERS[at]), step, weight=WEIGHTS[at], worker_id=f"w{at}")


def check(version: gradserve.Version, expected: float = MEAN) -> None:
    """Checks that a version has one number everywhere, and is made of three updates."""
    assert (version.num_updates, version.total_weight) == (3, sum(WEIGHTS))
    for name, value in VALUES.items():
        np.testing.assert_array_equal(version[name], np.full_like(value, expected))


STAGES: dict[str, tuple[Collection[str], int]] = {
    "before staging": (["StageUpdate"], 0),
    "staged on some": (["StageUpdate"], 1),
    "staged on all, and the answer lost": (["StageUpdate"], 2),
    "staged on all": (["Push", "PushPullParameters"], 0),
    "accepted, and the answer lost": (["Push"], 1),
    "decided, and the answer lost": (["PushPullParameters"], 1),
    "read from some": (["ReadParameters"], 1),
    "read from all, and the answer lost": (["ReadParameters"], 2),
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
        *[(stage, "push_pull") for stage in STAGES if not stage.startswith("accepted")],
        *[(stage, "push") for stage in STAGES if not stage.startswith("decided")],
    ],
)
def test_an_aggregator_that_ends_at_any_stage(
    addresses: list[str], gate: Gate, name: str, stage: str, kind: str
) -> None:
    """Whatever of its calls comes late, and whichever of them have been carried out."""

    def version_of(made: gradserve.Parameters, at: int) -> gradserve.Version:
        if kind == "push_pull":
            return push_pull(made, at).version
        push(made, at)
        return made.read(1, PATIENCE_SECONDS)

    near = RestartingAggregator(",".join(addresses))
    near.run.__enter__()
    try:
        with gradserve.connect(addresses) as client, clients_of(near.run.address, 2) as clients:
            there, *made = [made_by(each, name) for each in (client, *clients)]
            push(there, 2)
            gate.close(*STAGES[stage])
            with ThreadPoolExecutor(2) as threads:
                calls = [threads.submit(version_of, made[at], at) for at in range(2)]
                assert gate.has_come.wait(PATIENCE_SECONDS)
                near.restart()
                gate.open()
                for each in calls:
                    check(each.result())
            check(there.read())
            total = sum(WEIGHTS)
            assert there.info().weights == gradserve.WeightLedger(total, total, 0.0, {})
            assert sorted(each.weight for each in there.rounds()[0].updates) == sorted(WEIGHTS)
    finally:
        gate.open()
        near.run.__exit__()


@pytest.fixture
def tree(name: str) -> Iterator[tuple[list[gradserve.Parameters], gradserve.Parameters, LocalServer]]:
    """Parameters as two workers of an aggregator see them, and a client of the servers; and the aggregator."""
    with (
        running_tree_on(2, 2) as (addresses, near),
        clients_of(near.address, 2) as clients,
        gradserve.connect(addresses) as client,
    ):
        yield [made_by(each, name) for each in clients], made_by(client, name), near


Tree = tuple[list[gradserve.Parameters], gradserve.Parameters, LocalServer]


def test_a_retried_call_gets_its_first_answer(tree: Tree) -> None:
    made, there, _ = tree
    for again in (False, True):
        pushed = at_once(lambda at: push(made[at], at, request_id=1_000_000 + at), range(2))
        assert [(each.duplicate, each.weight) for each in pushed] == [(again, WEIGHTS[at]) for at in range(2)]
    assert (there.info().num_updates, there.info().weights.accepted) == (2, sum(WEIGHTS[:2]))
    check(push_pull(there, 2).version)


def test_a_refused_sum_goes_in_parts_and_is_forgotten(tree: Tree) -> None:
    """Worker w1 is in the round already, by another way."""
    made, there, near = tree
    push(there, 1)
    before = near.server.counts.alone
    outcomes = at_once(lambda at: push(made[at], at).outcome, range(2))
    assert outcomes == [gradserve.ACCEPTED, gradserve.Outcome.ALREADY_COUNTED]
    assert near.server.counts.alone == before + 2
    check(push_pull(there, 2).version)
    check(made[0].read())
    at_once(lambda at: push(made[at], at, 1), range(2))  # tells the servers what does not count
    check(push_pull(there, 2, 1).version, 2 * MEAN)
    check(made[0].read(), 2 * MEAN)
    num_bytes = there.info().num_bytes
    for step in range(2, 5):
        at_once(lambda at, step=step: push(made[at], at, step), range(2))
        push_pull(there, 2, step)
        check(made[0].read(), (step + 1) * MEAN)
        assert there.info().num_bytes == num_bytes


@pytest.mark.parametrize("reduction", ["mean", "median"])
def test_packed_updates(name: str, reduction: str) -> None:
    """The aggregator unpacks them: their blocks are not those of the servers' rows."""
    with running_tree_on(2, 2) as (addresses, near), clients_of(near.address, 2) as clients:
        values = {"w": np.zeros((7, 3), np.float32), "b": np.zeros(3, BFLOAT16)}
        how: dict[str, Any] = {"num_required": 2, "reduction": reduction}
        made = [each.parameters(values, name, sharded=True, **how) for each in clients]
        results = at_once(
            lambda each, number: each.push_pull(
                {key: np.full_like(value, number) for key, value in values.items()},
                0,
                worker_id=f"w{number}",
                codec=codecs.int8(),
                codec_down=codecs.bf16(),
            ),
            made,
            (127.0, 254.0),
        )
        assert (near.server.counts.sums, near.server.counts.alone) == ((1, 0) if reduction == "mean" else (0, 2))
        with gradserve.connect(addresses) as client:
            there = client.parameters(shared_name=name).read()
        for key, value in values.items():
            expected = np.full_like(value, 190.5)
            np.testing.assert_array_equal(there[key], expected)
            for each in results:
                np.testing.assert_array_equal(np.asarray(each.version[key], np.float32), expected.astype(BFLOAT16))


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[Started]":
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
            there, *made = [made_by(each, NAME, durability=durability) for each in (client, *clients)]
            yield servers, made, there


Started = tuple[list[RestartingServer], list[gradserve.Parameters], gradserve.Parameters]


@pytest.mark.parametrize("started", ["round", "gradient"], indirect=True)
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
def test_nothing_acknowledged_is_lost(started: Started, lost: int) -> None:
    """It is on disk, or the workers send it again."""
    servers, made, _ = started
    at_once(lambda at: push(made[at], at), range(2))
    servers[lost].restart()
    at_once(lambda each: each.info(), made)  # each learns of the restart by its next call
    check(push_pull(made[0], 2).version)
    servers[lost].restart()
    check(made[1].read())
    at_once(lambda at: push(made[at], at, 1), range(2))
    check(push_pull(made[1], 2, 1).version, 2 * MEAN)


@pytest.mark.parametrize("started", ["round", "gradient"], indirect=True)
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
def test_calls_that_wait_go_on(started: Started, lost: int) -> None:
    servers, made, there = started
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(push_pull, made[at], at) for at in range(2)]
        eventually(lambda: there.info().num_updates == 2)
        servers[lost].restart()
        eventually(lambda: there.info().num_updates == 2)
        check(push_pull(there, 2).version)
        for each in calls:
            check(each.result().version)


@pytest.mark.parametrize("started", ["round"], indirect=True)
def test_a_round_that_only_its_home_knows_has_its_sums_after_a_restart(started: Started) -> None:
    servers, made, there = started
    at_once(lambda at: push(made[at], at), range(2))
    push(there, 2)
    assert there.info().step == 1
    servers[HOME].restart()
    check(made[1].read())


def test_a_server_that_has_lost_its_rows_is_named(started: Started, tmp_path: Path) -> None:
    servers, made, there = started
    there.save(tmp_path / "saved")
    servers[OTHER].restart()
    for call in (lambda: push(made[0], 0), lambda: made[0].read(0)):
        with pytest.raises(gradserve.LostError, match=f"server {OTHER} of the cluster .* has lost its shard"):
            call()
    assert made[0].load(tmp_path / "saved").step == 1
    at_once(lambda at: push(made[at], at, 1), range(2))
    check(push_pull(there, 2, 1).version)


def test_a_home_that_has_lost_the_parameters(started: Started) -> None:
    """Workers learn of it as without an aggregator."""
    servers, made, _ = started
    at_once(lambda at: push(made[at], at), range(2))
    servers[HOME].restart()
    for each in made:
        with pytest.raises(gradserve.LostError, match="has lost parameters"):
            push(each, 2)
