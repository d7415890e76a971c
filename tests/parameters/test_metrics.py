"""Metrics of updates and evaluations of versions: weighted means, once each, with bounded names and memory."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Metrics, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import InvalidArgumentError, OutOfRangeError, ResourceExhaustedError
from gradserve_server.limits import MAX_METRICS
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.metrics import Evaluations, Report, canonical, mean_metrics
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import NO_HASH, RoundRecord, RoundUpdate
from gradserve_server.parameters.round_rules import PolynomialDiscount, Staleness
from gradserve_server.parameters.variables import Loaded
from tests.parameters.bench import ParametersBench, arrays, opened, push, sgd
from tests.parameters.checks import emptied, fails


@pytest.fixture
async def bench() -> AsyncIterator[ParametersBench]:
    """Checks at the end that deleted parameters leave nothing behind."""
    async with emptied(ParametersBench()) as bench:
        yield bench


HASH_BEFORE_METRICS = "275ec1abd6301d0c8b3d35bb990d5ee01fdb24461fae67b569b3118e12a5077d"
"""As servers made it before there were metrics."""


def metrics(**values: float) -> Metrics:
    return canonical(values)


def id_of(sequence: int, content: bytes = b"content") -> RequestId:
    return RequestId("client", sequence, content)


async def report(made: Parameters, step: int, call: RequestId | None = None, **fields: Any) -> Outcome:
    worker_id, weight = fields.pop("worker_id", ""), fields.pop("weight", 1.0)
    return (await made.report(call, Report(step, canonical(fields), weight, worker_id))).outcome


def means(made: Parameters) -> dict[int, Mapping[str, float]]:
    return {each.step: each.metrics for each in made.evaluations(None, 1000)[0]}


# Means


@pytest.mark.parametrize(
    ("weighted", "expected"),
    [
        ([], {}),
        ([(1.0, ()), (2.0, ())], {}),
        ([(1.0, metrics(loss=2)), (3.0, metrics(loss=4))], {"loss": 3.5}),
        ([(1.0, metrics(loss=2)), (3.0, metrics(accuracy=0.5)), (1.0, metrics(loss=4))], {"loss": 3, "accuracy": 0.5}),
        ([(1.0, metrics(loss=2)), (1.0, metrics(loss=math.nan))], {"loss": math.nan}),
        ([(1.0, metrics(loss=math.inf)), (1.0, metrics(loss=1))], {"loss": math.inf}),
        ([(1.0, metrics(loss=math.inf)), (1.0, metrics(loss=-math.inf))], {"loss": math.nan}),
    ],
    ids=["no updates", "no metrics", "weights", "only those that have it", "nan", "inf", "opposite infs"],
)
def test_means(weighted: Sequence[tuple[float, Metrics]], expected: Mapping[str, float]) -> None:
    assert mean_metrics(weighted) == pytest.approx(expected, nan_ok=True)


def test_means_are_those_of_numpy() -> None:
    random = np.random.default_rng(3)
    weights, losses = random.uniform(0.1, 9, 100), random.normal(size=100)
    found = mean_metrics([(weight, metrics(loss=loss)) for weight, loss in zip(weights, losses, strict=True)])
    assert found["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-12)


def test_means_have_the_first_names_of_very_many() -> None:
    many = [(1.0, metrics(**{f"m{update}.{number:02}": 1.0 for number in range(20)})) for update in range(5)]
    assert list(mean_metrics(many)) == [*[f"m0.{at:02}" for at in range(20)], *[f"m1.{at:02}" for at in range(12)]]


def test_there_is_one_nan() -> None:
    (other_nan,) = np.array([0x7FF8_0000_0000_0001]).view(np.float64).tolist()
    assert [(name, np.float64(value).tobytes()) for name, value in canonical({"b": other_nan, "a": 1})] == [
        ("a", np.float64(1).tobytes()),
        ("b", np.float64(math.nan).tobytes()),
    ]


# Updates


async def test_metrics_count_with_the_weight_that_counts(bench: ParametersBench) -> None:
    made = await bench.parameters(staleness=Staleness(2, PolynomialDiscount(0.5)), rounds={"num_required": 2})
    await push(made, {"w": [1, 1]}, worker_id="a", metrics=metrics(loss=9))
    await push(made, {"w": [1, 1]}, worker_id="b")
    await push(made, {"w": [1, 1]}, worker_id="a", weight=4.0, metrics=metrics(loss=1, accuracy=0.25))
    await push(made, {"w": [1, 1]}, 0, worker_id="b", weight=2.0, metrics=metrics(loss=3))
    first, second = made.records(0, 9)[0]
    assert (first.metrics, [each.metrics for each in first.updates]) == ({"loss": 9}, [metrics(loss=9), ()])
    assert second.metrics == {
        "loss": pytest.approx(np.average([1, 3], weights=[4, 2 / math.sqrt(2)])),
        "accuracy": 0.25,
    }
    assert made.metrics == made.ledger.metrics == second.metrics


async def test_metrics_of_a_sum_are_those_of_its_updates(bench: ParametersBench) -> None:
    made = await bench.parameters(
        staleness=Staleness(2, PolynomialDiscount(0.5)), rounds={"num_required": 2}, one_per_worker=False
    )
    for _ in range(2):
        await push(made, {"w": [1, 1]})
    summands = Summand(2.0, "a", metrics=metrics(loss=1)), Summand(4.0, "b", metrics=metrics(loss=4, accuracy=1))
    both = Contribution(0, 6.0, sum_of=summands)
    await made.push(None, both, opened({"w": [1, 1]}))
    newest = made.records(0, 9)[0][-1]
    assert [(each.worker_id, each.metrics) for each in newest.updates] == [
        (each.worker_id, each.metrics) for each in summands
    ]
    assert newest.metrics == pytest.approx({"loss": 3, "accuracy": 1})


async def test_dropped_updates_and_repeats_have_no_part(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2})
    for _ in range(3):
        await push(made, {"w": [1, 1]}, 0, worker_id="a", call=id_of(1), metrics=metrics(loss=1))
    assert (await push(made, {"w": [1, 1]}, worker_id="a", metrics=metrics(loss=7))).outcome is Outcome.ALREADY_COUNTED
    await push(made, {"w": [1, 1]}, worker_id="b", metrics=metrics(loss=2))
    assert (await push(made, {"w": [1, 1]}, 0, worker_id="c", metrics=metrics(loss=7))).outcome is Outcome.STALE
    await push(made, {"w": [1, 1]}, 0, worker_id="a", call=id_of(1), metrics=metrics(loss=1))
    assert [each.metrics for each in made.records(0, 9)[0]] == [{"loss": 1.5}]


async def test_a_round_that_is_dropped_leaves_no_metrics(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2})
    await push(made, {"w": [1, 1]}, worker_id="a", metrics=metrics(loss=1))
    await made.change(None, Changes(loaded=Loaded(arrays({"w": [5, 5]}))))
    for worker_id in "ab":
        await push(made, {"w": [1, 1]}, worker_id=worker_id, metrics=metrics(loss=3))
    assert [each.metrics for each in made.records(0, 9)[0]] == [{"loss": 3}]


def test_metrics_are_in_the_hash_of_a_record_and_a_record_without_any_keeps_its_hash() -> None:
    def hash_of(*found: Metrics) -> str:
        updates = tuple([RoundUpdate("w", 1.0, 1.0, 0, 8, metrics=each) for each in found])
        return RoundRecord(1, "required", 5, updates, (), b"0", b"1", 0.5, sgd()).chained(NO_HASH).hash.hex()

    plain, *others = [
        hash_of((), ()),
        hash_of(metrics(loss=1), ()),
        hash_of((), metrics(loss=1)),
        hash_of(metrics(loss=2), ()),
        hash_of(metrics(lose=1), ()),
        hash_of(metrics(loss=1, accuracy=1), ()),
    ]
    assert plain == HASH_BEFORE_METRICS
    assert len({plain, *others}) == 6


async def test_metrics_count_in_the_bookkeeping_of_the_round_and_of_the_record(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2}, keep_rounds=1)
    used: list[int] = []
    for found in ((), (), metrics(loss=1, accuracy=2), ()):
        await push(made, {"w": [1, 1]}, worker_id=f"w{len(used) % 2}", metrics=found)
        used.append(bench.bookkeeping.used)
    two = 2 * (96 + 49) + len("loss") + len("accuracy")
    assert used[3] - used[1] == two, "the record has them"
    bench.bookkeeping.limit = bench.bookkeeping.used + 1000
    many = metrics(**{f"{number:064}": 0.0 for number in range(MAX_METRICS)})
    await fails(made, ResourceExhaustedError, push(made, {"w": [1, 1]}, metrics=many), "bookkeeping")


# Evaluations


async def test_reports_on_a_version_become_one_evaluation(bench: ParametersBench) -> None:
    made = await bench.parameters()
    random = np.random.default_rng(5)
    weights, losses = random.uniform(0.1, 9, 20), random.normal(size=20)
    for number, (weight, loss) in enumerate(zip(weights, losses, strict=True)):
        assert await report(made, 0, worker_id=f"w{number}", weight=weight, loss=loss) is Outcome.ACCEPTED
    (found,) = made.evaluations(None, 10)[0]
    assert found.metrics == {"loss": pytest.approx(np.average(losses, weights=weights), rel=1e-12)}
    assert found.weight == pytest.approx(sum(weights))
    assert found.num_reports == 20
    assert list(found.worker_ids) == [f"w{number}" for number in range(20)]


async def test_a_worker_counts_once_for_a_version_and_a_call_once(bench: ParametersBench) -> None:
    made = await bench.parameters()
    await push(made, {"w": [1, 1]})
    for step in (0, 1):
        outcomes = [await report(made, step, worker_id="a", loss=loss) for loss in (1.0 + step, 9.0)]
        assert outcomes == [Outcome.ACCEPTED, Outcome.ALREADY_COUNTED]
    same = Report(1, metrics(loss=4))
    answers = [await made.report(id_of(1), same) for _ in range(3)]
    assert [(each.outcome, each.is_duplicate) for each in answers] == [
        (Outcome.ACCEPTED, False),
        (Outcome.ACCEPTED, True),
        (Outcome.ACCEPTED, True),
    ]
    assert means(made) == {0: {"loss": 1}, 1: {"loss": 3}}
    await fails(made, InvalidArgumentError, made.report(id_of(1, b"other"), same), field="request_id")
    await push(made, {"w": [1, 1]}, call=id_of(2))
    await fails(made, InvalidArgumentError, made.report(id_of(2), same), field="request_id")


@pytest.mark.parametrize(
    ("given", "error", "match", "field"),
    [
        (Report(-1, metrics(loss=1)), InvalidArgumentError, "at least 0 and at most 4", "step"),
        (Report(5, metrics(loss=1)), InvalidArgumentError, "at least 0 and at most 4", "step"),
        (Report(0, metrics(loss=1)), OutOfRangeError, "too old", "step"),
        (Report(1, metrics(loss=1)), OutOfRangeError, "too old", "step"),
        (Report(4, metrics(**{f"n{at}": 1 for at in range(32)})), InvalidArgumentError, "at most 32 names", "metrics"),
    ],
    ids=["negative", "future", "old", "just too old", "too many names"],
)
async def test_reports_that_do_not_fit_change_nothing(
    bench: ParametersBench, given: Report, error: Any, match: str, field: str
) -> None:
    made = await bench.parameters(keep_rounds=2, keep_versions=1)
    for _ in range(4):
        await push(made, {"w": [1, 1]})
    await report(made, 4, loss=1)
    await fails(made, error, made.report(None, given), match, field)
    used = bench.bookkeeping.used
    await report(made, 2, worker_id="a", loss=1)  # of the version before the oldest record
    assert bench.bookkeeping.used > used


async def test_a_report_needs_bookkeeping(bench: ParametersBench) -> None:
    made = await bench.parameters()
    bench.bookkeeping.limit = bench.bookkeeping.used + 500
    await fails(made, ResourceExhaustedError, made.report(None, Report(0, metrics(loss=1))), "bookkeeping")
    bench.bookkeeping.limit += 1 << 20
    await report(made, 0, loss=1)


def test_the_oldest_evaluations_go() -> None:
    evaluations = Evaluations(3)
    for step in (5, 0, 7, 6, 2, 9, 7):
        evaluations.add(Report(step, metrics(loss=step)))
        assert evaluations.num_bytes == sum([each.num_bytes for each in evaluations])
    assert [(each.step, each.num_reports) for each in evaluations] == [(6, 1), (7, 2), (9, 1)]


async def test_evaluations_come_in_pages(bench: ParametersBench) -> None:
    made = await bench.parameters()
    for _ in range(4):
        await push(made, {"w": [1, 1]})
    for step in (3, 0, 4):
        await report(made, step, loss=step)
    pages = [made.evaluations(since, 2) for since in (None, 0, 3, 4)]
    assert [([each.step for each in found], more) for found, more in pages] == [
        ([0, 3], True),
        ([3, 4], False),
        ([4], False),
        ([], False),
    ]


async def test_loaded_versions_can_be_evaluated(bench: ParametersBench) -> None:
    made = await bench.parameters()
    await made.change(None, Changes(loaded=Loaded(arrays({"w": [5, 5]})), step=10))
    await report(made, 10, loss=2)
    await push(made, {"w": [1, 1]})
    await push(made, {"w": [1, 1]})
    await report(made, 10, worker_id="late", loss=4)
    assert means(made) == {10: {"loss": 3}}
