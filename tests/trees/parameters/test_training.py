"""A tree trains to the version of its workers: the same bits, records and weights as without aggregators."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim, reductions
from gradserve_protocol.arrays import BFLOAT16
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator
from tests.trees.workers import at_once, clients_of

WORKERS = ("a", "b", "c", "d", "e")
WEIGHTS = (1.0, 2.0, 0.5, 4.0, 0.5)
ROUNDS = 3


@contextmanager
def five_workers(
    *, in_tree: bool, size: int = 1, grace: float = 30.0
) -> Iterator[tuple[list[gradserve.Client], list[LocalServer]]]:
    """Connects five workers: two to each of two aggregators and one to the servers, or all to the servers."""
    with ExitStack() as stack:
        stack.enter_context(small_pieces())
        top = addresses_of(stack.enter_context(running(size)))
        near = [stack.enter_context(aggregator(",".join(top), 2, grace)) for _ in range(2)] if in_tree else []
        clients: list[gradserve.Client] = []
        for each in near:
            clients += stack.enter_context(clients_of(each.address, 2))
        clients += stack.enter_context(clients_of(top, 1 if in_tree else 5))
        yield clients, near


@contextmanager
def running(size: int) -> Iterator[list[LocalServer]]:
    """Runs a server, or those of a cluster."""
    if size > 1:
        with running_cluster(size) as servers:
            yield servers
        return
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield [server]


def facts_of(made: gradserve.Parameters) -> list[Any]:
    """Returns what must not depend on the tree: all but the order of arrival, and times."""
    info, version = made.info(), made.read()
    records = [
        (
            each.step,
            each.reason,
            sorted(each.updates, key=lambda update: update.worker_id),
            each.refusals,
            each.digest_before,
            each.digest_after,
            each.lr,
        )
        for each in made.rounds()
    ]
    return [
        version.digest,
        records,
        info.weights,
        info.num_updates,
        (version.num_updates, version.total_weight, sorted(version.worker_ids)),
    ]


SPECS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "momentum": ({"optimizer": optim.SGD(0.5, momentum=0.5, nesterov=True)}, True),
    "adam on gradients": ({"update": "gradient", "optimizer": optim.Adam(0.25)}, True),
    "by count": ({"normalize": "count", "max_staleness": 1, "staleness": "exponential(0.5)"}, True),
    "sum": ({"reduction": "sum"}, True),
    "median": ({"reduction": "median"}, False),
    "krum": ({"reduction": reductions.krum(1)}, False),
    "reported": ({"reduction": reductions.krum(1, report_only=True)}, False),
    "clipped": ({"clip_norm": 4.0, "deterministic": True}, False),
    "deterministic": ({"deterministic": True}, False),
}


SIZES = pytest.mark.parametrize("size", [1, 2])
"""The number of servers; parameters are sharded over several."""


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_five_workers(spec: str, size: int) -> None:
    """Also with parameters that are sharded over several servers."""
    found = []
    how, adds_up = SPECS[spec]
    for in_tree in (True, False):
        with five_workers(in_tree=in_tree, size=size) as (clients, near):
            values = {"w": np.zeros(8, np.float32), "b": np.ones(3, BFLOAT16), "h": np.ones((), np.float16)}
            made = [
                each.parameters(values, shared_name="net", num_required=5, sharded=size > 1, **how) for each in clients
            ]

            for step in range(ROUNDS):
                updates = [
                    {name: np.full_like(each, 2**number + step) for name, each in values.items()} for number in range(5)
                ]
                results = at_once(
                    lambda each, update, weight, worker, step=step: each.push_pull(
                        update, step, weight=weight, worker_id=worker
                    ),
                    made,
                    updates,
                    WEIGHTS,
                    WORKERS,
                )
                assert {each.version.digest for each in results} == {made[0].read().digest}
                assert [(each.weight, each.staleness) for each in results] == [(weight, 0) for weight in WEIGHTS]
            assert facts_of(made[0]) == facts_of(made[-1])
            found.append(facts_of(made[-1]))
            for each in near:
                counts = each.server.counts
                assert (counts.gradients, counts.sums, counts.alone) == (
                    (2 * ROUNDS, ROUNDS, 0) if adds_up else (2 * ROUNDS, 0, 2 * ROUNDS)
                )
                assert counts.downloads <= ROUNDS
    for one, other in zip(*found, strict=True):
        assert one == other


@SIZES
def test_stale_updates_count_with_their_discount(size: int) -> None:
    found = []
    for in_tree in (True, False):
        with five_workers(in_tree=in_tree, size=size) as (clients, _):
            how: dict[str, Any] = {"max_staleness": 1, "staleness": "exponential(0.5)", "num_required": 5}
            made = [
                each.parameters({"w": np.zeros(4, np.float32)}, shared_name="net", sharded=size > 1, **how)
                for each in clients
            ]
            for step, local in enumerate((0, 0, 1)):
                results = at_once(
                    lambda each, number, worker, weight, local=local: each.push(
                        {"w": np.full(4, 2.0**number, np.float32)}, local, weight=weight, worker_id=worker
                    ),
                    made,
                    range(5),
                    WORKERS,
                    WEIGHTS,
                )
                factor = 0.5 if step > local else 1.0
                assert [each.weight for each in results] == [factor * weight for weight in WEIGHTS]
                assert {each.staleness for each in results} == {step - local}
                made[0].wait(step + 1, PATIENCE_SECONDS)
            late = at_once(lambda each, worker: each.push({"w": np.ones(4)}, 1, worker_id=worker), made, WORKERS)
            assert [(each.outcome, each.weight, each.staleness) for each in late] == [(gradserve.STALE, 0.0, 2)] * 5
            found.append(facts_of(made[0])[:3])
            assert made[0].info().weights.refused == {"stale": 5.0}
    assert found[0] == found[1]


@SIZES
def test_workers_with_different_components_do_not_go_together(size: int) -> None:
    with five_workers(in_tree=True, size=size) as (clients, near):
        values = {"w": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
        made = [each.parameters(values, shared_name="net", sharded=size > 1, num_required=5) for each in clients]
        names = (["w"], ["b"], ["w", "b"], ["b", "w"], ["b"])
        at_once(
            lambda each, having, worker: each.push(dict.fromkeys(having, np.full(2, 6.0)), 0, worker_id=worker),
            made,
            names,
            WORKERS,
        )
        version = made[0].read(1, PATIENCE_SECONDS)
        assert (version["w"].tolist(), version["b"].tolist()) == ([6, 6], [6, 6])
        assert [(each.server.counts.sums, each.server.counts.alone) for each in near] == [(0, 2), (1, 0)]


@SIZES
def test_updates_that_each_make_a_version_do_not_wait_for_others(size: int) -> None:
    """The grace of the aggregators would never end."""
    with five_workers(in_tree=True, size=size) as (clients, near):
        made = clients[0].parameters({"w": np.zeros(2)}, shared_name="net", sharded=size > 1)
        for step in range(3):
            assert made.push_pull({"w": np.ones(2)}, step).step == step + 1
        assert made.change(num_required=2).rules.num_required == 2
        others = [each.parameters({"w": np.zeros(2)}, shared_name="net", sharded=size > 1) for each in clients[:2]]
        results = at_once(lambda each, worker: each.push_pull({"w": np.ones(2)}, 3, worker_id=worker), others, "ab")
        assert [each.step for each in results] == [4, 4]
        assert (near[0].server.counts.sums, near[0].server.counts.alone) == (1, 3)


@SIZES
def test_a_part_that_cannot_count_leaves_the_others(size: int) -> None:
    """Worker b is in the round already, by another way."""
    with five_workers(in_tree=True, size=size) as (clients, near):
        made = [
            each.parameters({"w": np.zeros(2)}, shared_name="net", sharded=size > 1, num_required=3) for each in clients
        ]
        made[-1].push({"w": np.full(2, 2.0)}, 0, worker_id="b")
        results = at_once(
            lambda each, worker, value: each.push({"w": np.full(2, value)}, 0, worker_id=worker),
            made[:2],
            ("a", "b"),
            (4.0, 100.0),
        )
        assert [each.outcome for each in results] == [gradserve.ACCEPTED, gradserve.Outcome.ALREADY_COUNTED]
        made[-1].push({"w": np.full(2, 3.0)}, 0, worker_id="c")
        assert made[0].read(1, PATIENCE_SECONDS)["w"].tolist() == [3, 3]
        (record,) = made[0].rounds()
        assert [(each.worker_id, each.reason) for each in record.refusals] == [("b", "already counted")]
        assert made[0].info().weights == gradserve.WeightLedger(3.0, 3.0, 0.0, {"already counted": 1.0})
        assert (near[0].server.counts.sums, near[0].server.counts.alone) == (1, 2)


@SIZES
def test_an_aggregator_of_aggregators(size: int) -> None:
    with (
        small_pieces(),
        running(size) as top,
        aggregator(",".join(addresses_of(top)), 4) as middle,
        aggregator(middle.address, 2) as left,
        aggregator(middle.address, 2) as right,
        clients_of(left.address, 2) as clients,
        clients_of(right.address, 2) as others,
    ):
        how: dict[str, Any] = {"max_staleness": 1, "staleness": "exponential(0.5)", "num_required": 4}
        made = [
            each.parameters({"w": np.zeros(5, np.float16)}, shared_name="net", sharded=size > 1, **how)
            for each in (*clients, *others)
        ]
        for step in range(2):
            results = at_once(
                lambda each, number: each.push_pull(
                    {"w": np.full(5, number)}, 0, weight=WEIGHTS[number], worker_id=WORKERS[number]
                ),
                made,
                range(4),
            )
            assert [each.weight for each in results] == [weight * (0.5 if step else 1.0) for weight in WEIGHTS[:4]]
            assert (results[0].version.num_updates, sorted(results[0].version.worker_ids)) == (4, list("abcd"))
        expected = 2 * np.average(range(4), weights=WEIGHTS[:4])
        np.testing.assert_allclose(made[0].read()["w"], np.full(5, expected), rtol=2**-10)
        assert (middle.server.counts.sums, middle.server.counts.gradients) == (2, 8)
