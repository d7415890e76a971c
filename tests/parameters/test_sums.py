"""Sums of updates count as the updates that are in them: same bits, records, weights and answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import NoneType
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.arrays import BFLOAT16
from gradserve_server.accumulators.gradient import Contribution, Gradient, Summand, sum_of_weights
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.records import contribution_of, contribution_record
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import AbortedError, InvalidArgumentError
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.reductions.spec import Krum, Mean, Median, Reduction, Sum
from gradserve_server.parameters.round_rules import ExponentialDiscount, PolynomialDiscount, Staleness
from gradserve_server.parameters.spec import Normalization, UpdateKind
from tests.parameters.bench import ParametersBench, adam, opened, push, sgd, shown
from tests.parameters.checks import emptied, fails

WEIGHTS = (1.0, 4.0, 0.5)
WORKERS = ("a", "b", "")


@pytest.fixture
async def bench() -> AsyncIterator[ParametersBench]:
    async with emptied(ParametersBench()) as bench:
        yield bench


def summands(weights: tuple[float, ...] = WEIGHTS, workers: tuple[str, ...] = WORKERS) -> tuple[Summand, ...]:
    return tuple(
        [
            Summand(weight, worker, RequestId(f"client-{number}", 1))
            for number, (weight, worker) in enumerate(zip(weights, workers, strict=True))
        ]
    )


def contribution(local_step: int, of: tuple[Summand, ...]) -> Contribution:
    return Contribution(local_step, sum_of_weights([each.weight for each in of]), "a", 1, sum_of=of)


def total(updates: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the weighted sum as an aggregator sends it: in the dtypes of the masters."""
    found = {}
    for name, first in updates[0].items():
        wide = np.dtype(np.float64 if first.dtype == np.float64 else np.float32)
        found[name] = np.zeros(first.shape, wide)
        for weight, each in zip(WEIGHTS, updates, strict=True):
            found[name] += weight * each[name].astype(wide)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stale": {"staleness": Staleness(2, ExponentialDiscount(0.5))},
    "by count": {"staleness": Staleness(2, ExponentialDiscount(0.25)), "normalization": Normalization.COUNT},
    "sum": {"reduction": Sum(), "staleness": Staleness(1)},
    "gradients": {"update": UpdateKind.GRADIENT, "optimizer": adam(0.5)},
    "momentum": {"optimizer": sgd(0.5, 0.5)},
    "many of a worker": {"one_per_worker": False},
}


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("only", [("w",), ("w", "b")], ids=len)
async def test_a_sum_is_its_updates(kind: str, dtype: Any, only: tuple[str, ...]) -> None:
    found = []
    is_late = "staleness" in KINDS[kind]
    for as_sum in (True, False):
        async with emptied(ParametersBench()) as bench:
            values = {"w": np.array([1, 2], dtype), "b": np.array([0.5], dtype)}
            made = await bench.parameters(values, rounds={"num_required": 4}, keep_versions=3, **KINDS[kind])
            for worker in range(4):  # the first round
                await push(made, {"w": values["w"]}, worker_id=f"first-{worker}")
            updates = [
                {
                    name: np.array([1, 2] if name == "w" else [4], np.float32).astype(dtype) * (number + 1)
                    for name in only
                }
                for number in range(3)
            ]
            step = 0 if is_late else 1
            calls = [each.call for each in summands()]
            if as_sum:
                given = opened(total(updates))
                pushed, duplicate = await made.push(RequestId("aggregator", 1), contribution(step, summands()), given)
                assert (pushed.outcome, duplicate, pushed.num_accumulated) == (Outcome.ACCEPTED, False, 3)
            else:
                for number, each in enumerate(updates):
                    alone = Contribution(step, WEIGHTS[number], WORKERS[number])
                    await made.push(calls[number], alone, opened(each))
            before = made.state
            again = [await made.push(each, Contribution(step), opened(updates[0])) for each in calls]
            assert made.state == before
            await push(made, {name: np.ones_like(each) for name, each in updates[0].items()}, worker_id="last")
            (records, _), state = made.records(0, 10), made.state
            facts = [
                shown(made.newest),
                [(each.weight, each.staleness, each.outcome, duplicate) for each, duplicate in again],
                [each.updates for each in records],
                (state.weights, state.digest, state.step, made.newest.num_gradients, made.newest.total_weight),
                sorted(made.newest.worker_ids),
            ]
            found.append(facts)
    for one, other in zip(*found, strict=True):
        assert one == other


async def test_a_sum_that_is_too_stale_is_refused_with_each_of_its_updates(bench: ParametersBench) -> None:
    made = await bench.parameters()
    await push(made, {"w": [1, 1]})
    applied, _ = await made.push(RequestId("x", 1), contribution(0, summands()), opened({"w": [1, 1]}))
    assert (applied.outcome, applied.weight) == (Outcome.STALE, 0.0)
    assert made.state.weights.refused == {"stale": sum(WEIGHTS)}
    assert [(each.worker_id, each.weight) for each in made.ledger.refusals] == list(zip(WORKERS, WEIGHTS, strict=True))
    for each in summands():
        again, duplicate = await made.push(each.call, Contribution(0), opened({"w": [1, 1]}))
        assert (again.outcome, again.weight, duplicate) == (Outcome.STALE, 0.0, True)


@pytest.mark.parametrize(
    ("prepare", "of", "match"),
    [
        ({"worker_id": "a"}, summands(), "a worker is in the round already"),
        ({"call": RequestId("client-1", 1)}, summands(), "the call client-1:1 has been made before"),
        ({}, summands(workers=("a", "a", "b")), "twice in the sum"),
    ],
    ids=["worker", "call", "twice"],
)
async def test_a_sum_of_which_a_part_cannot_count(
    bench: ParametersBench, prepare: dict[str, Any], of: tuple[Summand, ...], match: str
) -> None:
    """Nothing of it counts; then its updates come one by one."""
    made = await bench.parameters(rounds={"num_required": 10})
    await push(made, {"w": [1, 1]}, **prepare)
    call = made.push(RequestId("x", 1), contribution(0, of), opened({"w": [1, 1]}))
    await fails(made, AbortedError, call, match, "sum_of")


SINGLE: list[tuple[dict[str, Any], str]] = [
    ({"reduction": Median()}, "reduction median, which looks at each"),
    ({"reduction": Krum(0, report_only=True), "rounds": {"num_required": 3}}, "reduction krum"),
    ({"clip_norm": 1.0}, "clip_norm, which looks at each"),
    ({"deterministic": True}, "a deterministic order"),
]


@pytest.mark.parametrize(("spec", "match"), SINGLE, ids=[each for _, each in SINGLE])
async def test_parameters_that_need_each_update(bench: ParametersBench, spec: dict[str, Any], match: str) -> None:
    made = await bench.parameters(**spec)
    assert not made.spec.adds_up
    with pytest.raises(InvalidArgumentError, match=match) as raised:
        made.spec.of_update(["w"], is_sum=True)
    assert raised.value.field == "sum_of"


@pytest.mark.parametrize("reduction", [Mean(), Sum()])
async def test_parameters_that_take_sums(bench: ParametersBench, reduction: Reduction) -> None:
    made = await bench.parameters({"w": np.zeros(2, np.float16)}, reduction=reduction)
    assert made.spec.adds_up
    assert made.spec.of_update(["w"], is_sum=True).components[0].dtype == np.float32


async def test_a_weight_that_becomes_too_small(bench: ParametersBench) -> None:
    made = await bench.parameters(staleness=Staleness(1, PolynomialDiscount(1.0)))
    await push(made, {"w": [1, 1]})
    of = summands(weights=(1.0, 2.0**-64, 1.0))
    call = made.push(RequestId("x", 1), contribution(0, of), opened({"w": [1, 1]}))
    await fails(made, InvalidArgumentError, call, "expected a weight from", "sum_of[1].weight")


async def test_waiting_workers_are_those_of_the_updates(bench: ParametersBench) -> None:
    made: Parameters = await bench.parameters(rounds={"num_required": 2, "expected": "alive", "grace": 60.0})
    await made.push(RequestId("x", 1), contribution(0, summands(workers=("a", "b", "c"))), opened({"w": [1, 1]}))
    assert dict(made.ledger.clients) == {"a": "client-0", "b": "client-1", "c": "client-2"}
    assert made.state.worker_ids == ("a", "b", "c")


@pytest.mark.parametrize("fails", [False, True], ids=["counts", "fails"])
async def test_an_update_that_comes_alone_while_it_is_added_in_a_sum(bench: ParametersBench, fails: bool) -> None:
    made, of, may_open = await bench.parameters(rounds={"num_required": 4}), summands(), asyncio.Event()

    async def open_later(use: Callable[[Gradient], Awaitable[Any]]) -> Any:
        await may_open.wait()
        if fails:
            raise InvalidArgumentError("another update of the sum does not fit")
        return await opened({"w": [11, 11]})(use)

    adding = asyncio.create_task(made.push(RequestId("x", 1), contribution(0, of), open_later))
    await asyncio.sleep(0)
    own = Contribution(weight=of[1].weight, worker_id=of[1].worker_id)
    alone = asyncio.create_task(made.push(of[1].call, own, opened({"w": [2, 2]})))
    await asyncio.sleep(0)
    may_open.set()
    pushed, duplicate = await alone
    assert (pushed.outcome, pushed.weight, duplicate) == (Outcome.ACCEPTED, of[1].weight, not fails)
    assert made.state.num_updates == (1 if fails else 3)
    assert isinstance(adding.exception(), InvalidArgumentError if fails else NoneType)


def test_records_of_discounted_sums() -> None:
    discounted = contribution(3, summands()).discounted(0.5)
    assert (discounted.weight, discounted.factor) == (2.75, 0.5)
    assert contribution_of(contribution_record(discounted)) == discounted
    assert "discount" not in contribution_record(contribution(3, summands()))
