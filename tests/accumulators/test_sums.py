"""A sum of gradients, as an aggregator passes it on, counts as all of them."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import GradientAnswered
from gradserve_server.accumulators.records import EVENTS, contribution_of
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.spec import ComponentSpec, Layout
from gradserve_server.errors import AbortedError, DeadlineExceededError, InvalidArgumentError
from tests.accumulators.bench import F32, Bench, apply, gradient, opened, push_pull, take, value_of


def call(client: str, sequence: int = 1, fingerprint: bytes = b"") -> RequestId:
    return RequestId(client, sequence, fingerprint)


def sum_of(*workers: str, step: int = 0, weights: tuple[float, ...] = ()) -> Contribution:
    """A sum of the first calls of workers."""
    factors = weights or (1.0,) * len(workers)
    summands = tuple(Summand(weight, worker, call(worker)) for worker, weight in zip(workers, factors, strict=True))
    return Contribution(step, sum(factors), "host", 1, summands)


async def apply_sum(acc: Any, *values: float, of: Contribution, number: int = 1) -> Any:
    return await acc.apply(call("aggregator", number), of, gradient(*values))


async def test_it_counts_as_all_its_gradients() -> None:
    acc = Bench().accumulator()
    applied, _ = await apply_sum(acc, 10.0, of=sum_of("a", "b", "c", weights=(1.0, 2.0, 1.0)))
    assert applied.num_accumulated == acc.num_accumulated == 3
    await apply(acc, 6.0, worker_id="d", weight=4.0)
    average, _ = await take(acc, 4)
    assert value_of(average) == [(10.0 + 24.0) / 8.0]
    assert (average.num_gradients, average.total_weight, average.worker_ids) == (4, 8.0, ("a", "b", "c", "d"))


async def test_missing_workers_are_those_of_the_sum() -> None:
    acc = Bench().accumulator()
    await apply_sum(acc, 1.0, of=sum_of("a", "b"))
    await take(acc, 2)
    await apply(acc, 1.0, worker_id="a", local_step=1)
    assert (list(acc.rounds.members.workers), list(acc.rounds.missing_workers)) == (["a"], ["b"])
    with pytest.raises(DeadlineExceededError, match="missing from the previous round: b"):
        await take(acc, 2, timeout=0.001)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_its_values_are_not_rounded_to_the_dtype_of_the_component(dtype: Any, deterministic: bool) -> None:
    acc = Bench().accumulator(ComponentSpec("", np.dtype(dtype)), deterministic=deterministic)
    exact = np.float32(1 + 2**-12)
    assert dtype(exact) != exact
    for values, how in (
        (np.array([2048 * exact - 2047], np.float32), sum_of("a", "b")),
        (np.array([1.0], dtype), Contribution(worker_id="c")),
    ):
        await acc.apply(None, how, opened(Gradient({"": values})))
    average, _ = await take(acc, 3)
    expected = (np.float64(2048 * exact - 2047) + 1) / 3
    assert average.values[""].dtype == dtype
    assert average.values[""][0] == np.float64(expected).astype(dtype)


@pytest.mark.parametrize("last", ["sum", "gradient"])
async def test_large_sums_of_16_bits(last: str) -> None:
    """Kernels compute these; they add and divide at once only what has the dtype of the result."""
    rng = np.random.default_rng(3)
    acc = Bench().accumulator(ComponentSpec("", np.dtype(np.float16)))
    whole = rng.standard_normal(1 << 20).astype(np.float32) * 3
    one = rng.standard_normal(1 << 20).astype(np.float16)
    gradients: list[tuple[Any, Contribution]] = [(whole, sum_of("a", "b", "c")), (one, Contribution(worker_id="d"))]
    for values, how in gradients if last == "gradient" else reversed(gradients):
        await acc.apply(None, how, opened(Gradient({"": values})))
    average, _ = await take(acc, 4)
    np.testing.assert_array_equal(
        average.values[""], ((whole + one.astype(np.float32)) / np.float32(4)).astype(np.float16)
    )


async def test_deterministic_sums_have_their_place_in_the_order() -> None:
    def values(number: int) -> Gradient:
        return Gradient({"": np.random.default_rng(number).standard_normal(100).astype(np.float32)})

    given = [
        (values(1), sum_of("x", "y")),
        (values(2), Contribution(worker_id="a")),
        (values(3), Contribution(worker_id="z")),
    ]
    results = []
    for order in (given, given[::-1]):
        acc = Bench().accumulator(deterministic=True)
        for each, how in order:
            await acc.apply(None, how, opened(each))
        results.append((await take(acc, 4))[0].values[""].tobytes())
    assert results[0] == results[1]


async def test_each_of_its_calls_counts_once() -> None:
    acc = Bench().accumulator()
    await apply_sum(acc, 3.0, of=sum_of("a", "b"))
    # Sent again alone, to whichever server.
    applied, duplicate = await acc.apply(call("a", 1, b"print"), Contribution(worker_id="a"), gradient(1.0))
    assert (duplicate, applied.outcome, acc.num_accumulated) == (True, Outcome.ACCEPTED, 2)
    # In another sum, of which nothing counts.
    with pytest.raises(AbortedError, match="b:1 has been made before: send the gradients of the sum one by one"):
        await apply_sum(acc, 3.0, of=sum_of("b", "c"), number=2)
    assert acc.num_accumulated == 2
    assert list(acc.rounds.members.workers) == ["a", "b"]
    # The same sum again.
    assert (await apply_sum(acc, 3.0, of=sum_of("a", "b")))[1]


async def test_a_call_of_another_kind_is_refused() -> None:
    acc = Bench().accumulator()
    await apply_sum(acc, 3.0, of=sum_of("a", "b"))
    with pytest.raises(InvalidArgumentError, match="expected the same content"):
        await take(acc, 1, call("a", 1, b"take"))


async def test_a_sum_whose_workers_are_in_the_round_is_refused_if_each_counts_once() -> None:
    acc = Bench().accumulator(one_per_worker=True)
    await apply(acc, 1.0, worker_id="a")
    for number, workers in enumerate([("a", "b"), ("c", "c")]):
        with pytest.raises(AbortedError, match="one by one"):
            await apply_sum(acc, 2.0, of=sum_of(*workers), number=number)
    assert list(acc.rounds.members.workers) == ["a"]


async def test_a_stale_sum_is_stale_for_all_its_calls() -> None:
    acc = Bench().accumulator()
    await acc.set_global_step(5)
    applied, _ = await apply_sum(acc, 2.0, of=sum_of("a", "b", step=4))
    assert applied.outcome is Outcome.STALE
    again, duplicate = await acc.apply(call("b"), Contribution(4, worker_id="b"), gradient(1.0))
    assert (again.outcome, duplicate) == (Outcome.STALE, True)


async def test_the_average_of_a_sum_is_kept_for_its_calls() -> None:
    bench = Bench()
    acc = bench.accumulator()
    pulled = await acc.push_pull(call("aggregator"), sum_of("a", "b"), gradient(3.0), 2, 5)
    for number in (1, 2):
        await apply(acc, 1.0, local_step=number)
        await take(acc, 1)
    applied, average, duplicate = await push_pull(acc, 1.0, num_required=2, call=call("b"), worker_id="b")
    assert duplicate
    assert average is pulled[1]
    assert applied.round.step == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Contribution(sum_of=(Summand(), Summand(weight=0.0))), "expected a positive, finite weight, got 0"),
        (Contribution(sum_of=(Summand(weight=float("nan")),)), "expected a positive, finite weight, got nan"),
    ],
)
async def test_weights_are_checked(how: Contribution, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        await Bench().accumulator().apply(None, how, gradient(1.0))


async def test_sparse_gradients_come_one_by_one() -> None:
    acc = Bench().accumulator(ComponentSpec("e", F32, layout=Layout.SPARSE))
    with pytest.raises(InvalidArgumentError, match="which has sparse components, got the sum of several"):
        await acc.apply(None, sum_of("a", "b"), gradient(1.0))


def test_it_is_recorded() -> None:
    event = GradientAnswered(call("aggregator"), sum_of("a", "b", weights=(0.5, 2.0)), Outcome.ACCEPTED, True)
    assert EVENTS.event(json.loads(json.dumps(EVENTS.record(event)))) == event


def test_records_without_sums_are_read() -> None:
    record = {"local_step": 3, "weight": 0.5, "worker_id": "a", "sequence": 7}
    assert contribution_of(record) == Contribution(3, 0.5, "a", 7)
