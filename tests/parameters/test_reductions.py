"""Reductions against straightforward float64 computations, their bits, and what is refused."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.reductions import (
    Elsewhere,
    GeometricMedian,
    Krum,
    Maximum,
    Mean,
    Median,
    Reduction,
    Report,
    Sum,
    TrimmedMean,
    UpdateReport,
    choices,
    clip_scale,
    measured_distances,
    measured_norm,
    reduce_as_decided,
    reduce_updates,
    reduction_of,
    reduction_record,
)
from gradserve_server.parameters.reductions.exact import ExactSums, rounded, sums
from gradserve_server.parameters.round_rules import RoundRules
from tests.together import together

Arrays = dict[str, NDArray[Any]]

DTYPES: tuple[Any, ...] = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SHAPES: dict[str, tuple[int, ...]] = {"w": (41, 1700), "b": (17,), "scalar": (), "empty": (0, 3)}
KINDS: tuple[Reduction, ...] = (
    Mean(),
    Sum(),
    Median(),
    Maximum(),
    TrimmedMean(0.2),
    Krum(2),
    Krum(2, 3),
    GeometricMedian(1000, 1e-12),
)


def drawn(
    count: int, dtype: Any = np.float32, seed: int = 1, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[Arrays]:
    """Updates around a common direction; the last is far from it."""
    rng = np.random.default_rng(seed)
    common = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    spread = [1.0] * (count - 1) + [20.0]
    return [
        {
            name: np.asarray(middle + each * rng.standard_normal(middle.shape)).astype(dtype)
            for name, middle in common.items()
        }
        for each in spread
    ]


def weights_of(count: int) -> list[float]:
    return [0.5 + (3 * number % 5) for number in range(count)]


def flat(update: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(each, np.float64).ravel() for each in update.values()])


class Reduced(NamedTuple):
    values: Arrays
    report: Report

    @property
    def updates(self) -> Sequence[UpdateReport]:
        return self.report.updates

    @property
    def note(self) -> str | None:
        return self.report.note


def reduce(
    kind: Reduction,
    updates: Sequence[Arrays],
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Reduced:
    known = list(dict.fromkeys(name for update in updates for name in update)) if names is None else names
    return Reduced(
        *reduce_updates(kind, known, updates, [1.0] * len(updates) if weights is None else weights, **options)
    )


# Oracles


def krum_oracle(points: NDArray[np.float64], krum: Krum) -> list[int]:
    count = len(points)
    distances = [[float(((a - b) ** 2).sum()) for b in points] for a in points]
    scores = [sum(sorted(row)[1 : max(1, count - krum.num_byzantine - 2) + 1]) for row in distances]
    return sorted(sorted(range(count), key=lambda each: scores[each])[: krum.num_selected])


def oracle(kind: Reduction, points: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[Any]:
    match kind:
        case Mean():
            return np.average(points, axis=0, weights=weights)
        case Sum():
            return np.asarray(weights @ points, np.float64)
        case Maximum():
            return np.asarray(np.max(points, axis=0))
        case Median():
            return np.asarray(np.median(points, axis=0))
        case TrimmedMean(fraction):
            cut = int(fraction * len(points))
            return np.asarray(np.sort(points, axis=0)[cut : len(points) - cut].mean(axis=0))
        case Krum():
            chosen = krum_oracle(points, kind)
            return np.average(points[chosen], axis=0, weights=weights[chosen])
        case GeometricMedian():
            at = np.asarray(np.average(points, axis=0, weights=weights), np.float64)
            for _ in range(500):
                pulls = weights / np.maximum(np.linalg.norm(points - at, axis=1), 1e-300)
                at = pulls @ points / pulls.sum()
            return at
        case _:
            raise NotImplementedError(kind)


def scaled(points: NDArray[np.float64], clip_norm: float | None) -> NDArray[np.float64]:
    if clip_norm is None:
        return points
    return np.asarray(points * np.minimum(1, clip_norm / np.linalg.norm(points, axis=1))[:, None])


TOLERANCES = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}


@pytest.mark.sampled
@pytest.mark.parametrize("clip_norm", [None, 1000.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reductions(kind: Reduction, dtype: Any, clip_norm: float | None) -> None:
    updates, weights = drawn(8, dtype), weights_of(8)
    reduced = reduce(kind, updates, weights, clip_norm=clip_norm)
    points = np.stack([flat(update) for update in updates])
    expected = oracle(kind, scaled(points, clip_norm), np.array(weights))
    master = np.dtype(np.float64 if dtype is np.float64 else np.float32)
    assert {name: (each.shape, each.dtype) for name, each in reduced.values.items()} == {
        name: (shape, master) for name, shape in SHAPES.items()
    }
    tolerance = 1e-6 if isinstance(kind, GeometricMedian) else TOLERANCES[master]
    np.testing.assert_allclose(flat(reduced.values), expected, rtol=tolerance, atol=tolerance)
    norms = np.linalg.norm(points, axis=1)
    result = flat(reduced.values)
    for each, point, norm in zip(reduced.updates, points, norms, strict=True):
        assert each.norm == pytest.approx(norm, rel=1e-12)
        assert each.scale == pytest.approx(1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm)
        assert each.cosine == pytest.approx(point @ result / norm / np.linalg.norm(result), rel=1e-9)
    dropped = [index for index, each in enumerate(reduced.updates) if each.is_dropped]
    if isinstance(kind, Krum):
        kept = krum_oracle(scaled(points, clip_norm), kind)
        assert dropped == [index for index in range(8) if index not in kept]
    else:
        assert not dropped
    assert reduced.note is None


@pytest.mark.sampled
@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("kind", [Median(), TrimmedMean(0.0), TrimmedMean(0.34), TrimmedMean(0.49)], ids=str)
def test_any_number_of_updates_in_order(kind: Reduction, count: int) -> None:
    updates = drawn(count, np.float64, shapes={"a": (9,)})
    expected = oracle(kind, np.stack([flat(update) for update in updates]), np.ones(count))
    np.testing.assert_allclose(reduce(kind, updates).values["a"], expected, rtol=1e-15)


@together(
    "fraction, count, trimmed",
    *zip(
        (0.0, 9, 0),
        (0.1, 9, 0),
        (0.1, 10, 1),
        (0.3, 10, 3),
        (0.29, 100, 29),
        (0.49, 100, 49),
        (0.25, 7, 1),
        strict=True,
    ),
)
def test_trimmed_values(fraction: float, count: int, trimmed: int) -> None:
    assert TrimmedMean(fraction).kept(count) == range(trimmed, count - trimmed)


@given(st.integers(0, 49), st.integers(1, 1000))
def test_something_is_left(percent: int, count: int) -> None:
    assert TrimmedMean(percent / 100).kept(count)


def test_normalization_by_count() -> None:
    updates = [{"a": np.array([3.0]), "b": np.array([3.0])}, {"a": np.array([5.0])}]
    counted = reduce(Mean(), updates, [0.5, 2.0], by_count=True)
    assert [counted.values[name].tolist() for name in "ab"] == [[(1.5 + 10.0) / 2], [1.5]]
    weighted = reduce(Mean(), updates, [0.5, 2.0])
    assert [weighted.values[name].tolist() for name in "ab"] == [[(1.5 + 10.0) / 2.5], [3.0]]


def test_components_are_reduced_over_the_updates_that_have_them() -> None:
    updates = [{"a": np.array([value], np.float32)} for value in (1.0, 2.0, 9.0)]
    updates[1]["b"] = np.array([4.0, 3.0], np.float32)
    for kind, expected in ((Mean(), 4.0), (Sum(), 12.0), (Median(), 2.0), (Maximum(), 9.0), (TrimmedMean(0.4), 2.0)):
        reduced = reduce(kind, updates, names=["a", "b", "c"])
        assert {name: each.tolist() for name, each in reduced.values.items()} == {"a": [expected], "b": [4.0, 3.0]}
        assert [each.norm for each in reduced.updates] == [1.0, math.sqrt(29), 9.0]
        assert [each.cosine for each in reduced.updates][::2] == [1.0, 1.0], "over the components that an update has"


def test_norms_are_limited_over_all_components() -> None:
    updates = [{"a": np.array([3.0]), "b": np.array([4.0])}, {"a": np.array([1.0]), "b": np.array([0.0])}]
    reduced = reduce(Sum(), updates, clip_norm=2.5)
    assert {name: each.tolist() for name, each in reduced.values.items()} == {"a": [2.5], "b": [2.0]}
    assert [(each.norm, each.scale) for each in reduced.updates] == [(5.0, 0.5), (1.0, 1.0)]
    np.testing.assert_array_equal(updates[0]["a"], [3.0])


def test_the_factor_that_limits_a_norm() -> None:
    updates = drawn(6)
    reduced = reduce(Mean(), updates, clip_norm=1000.0)

    def scale_of(update: Arrays) -> float:
        return clip_scale(rounded(measured_norm(update)), 1000.0)

    assert [scale_of(update) for update in updates] == [each.scale for each in reduced.updates]
    assert {each.scale == 1 for each in reduced.updates} == {True, False}
    assert scale_of({"a": np.array([1.0, math.inf])}) == 0
    assert scale_of({"a": np.array([], np.float32)}) == scale_of({}) == 1


def test_a_selected_update_is_not_changed() -> None:
    """Not even by its weight: x 0.1 / 0.1 is not always x."""
    updates = drawn(7, np.float64)
    reduced = reduce(Krum(2), updates, [0.1] * 7)
    (kept,) = [number for number, each in enumerate(reduced.updates) if not each.is_dropped]
    np.testing.assert_array_equal(flat(reduced.values), flat(updates[kept]))


def test_of_equal_scores_the_first_is_selected() -> None:
    updates = [{"a": np.array([value])} for value in (9.0, 2.0, 2.0, 2.0, -9.0)]
    assert [each.is_dropped for each in reduce(Krum(1), updates).updates] == [True, False, True, True, True]


def test_report_only() -> None:
    updates, weights = drawn(7), weights_of(7)
    reported = reduce(Krum(2, 2, report_only=True), updates, weights)
    mean, krum = reduce(Mean(), updates, weights), reduce(Krum(2, 2), updates, weights)
    for name, values in mean.values.items():
        np.testing.assert_array_equal(reported.values[name], values)
    assert [each.is_dropped for each in reported.updates] == [each.is_dropped for each in krum.updates]
    assert [each.cosine for each in reported.updates] == [each.cosine for each in mean.updates]


# Krum of too few


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_krum_of_too_few_updates_is_a_median(count: int) -> None:
    updates = drawn(count)
    reduced, median = reduce(Krum(2), updates), reduce(Median(), updates)
    assert reduced.note == "krum of fewer than 7 updates: median"
    for name, values in median.values.items():
        np.testing.assert_array_equal(reduced.values[name], values)
    assert not any(each.is_dropped for each in reduced.updates)
    reported = reduce(Krum(2, report_only=True), updates)
    assert reported.note == "krum of fewer than 7 updates: nothing"
    np.testing.assert_array_equal(flat(reported.values), flat(reduce(Mean(), updates).values))
    assert not any(each.is_dropped for each in reported.updates)


# Geometric median


def objective(points: NDArray[Any], weights: NDArray[Any], at: NDArray[Any]) -> float:
    return float(weights @ np.linalg.norm(points - at, axis=1))


@together(
    "values, weights, expected",
    *zip(
        ([0.0], [2.0], 0.0),
        ([5.0, 5.0, 5.0], [1.0, 1.0, 1.0], 5.0),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 0.0),
        ([0.0, 1.0, 10.0], [1.0, 1.0, 1.0], 1.0),
        ([0.0, 0.0, 0.0, 1.0, 4.0], [1.0] * 5, 0.0),  # the mean, where the iteration begins, is an update
        ([0.0, 1.0, 10.0], [1.0, 1.0, 3.0], 10.0),
        ([1e-170, 2e-170, 1e-169], [1.0, 1.0, 1.0], 2e-170),  # squares vanish
        ([1e100, 2e100, 1e101], [1.0, 1.0, 1.0], 2e100),
        ([1.0, 2.0, 9.0], [1e-100, 1e-100, 1e-100], 2.0),
        strict=True,
    ),
)
def test_geometric_median_of_a_line(values: list[float], weights: list[float], expected: float) -> None:
    reduced = reduce(GeometricMedian(), [{"a": np.array([value])} for value in values], weights)
    tolerance = 1e-169 if expected == 2e-170 else 0.0
    assert reduced.values["a"].tolist() == pytest.approx([expected], rel=1e-12, abs=tolerance)


def test_geometric_median_of_a_triangle() -> None:
    """Fermat's point of a triangle, from which all sides are seen under 120 degrees."""
    corners = np.array([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]])
    at = reduce(GeometricMedian(1000, 1e-12), [{"a": corner} for corner in corners]).values["a"]
    rays = (corners - at) / np.linalg.norm(corners - at, axis=1)[:, None]
    for one, other in itertools.combinations(rays, 2):
        assert one @ other == pytest.approx(-0.5, abs=1e-6)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 10_000), st.booleans())
def test_geometric_medians_are_no_worse_than_any_other_point(count: int, size: int, seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    points = rng.integers(-2, 3, (count, size)).astype(float) if whole else rng.standard_normal((count, size))
    weights = rng.integers(1, 4, count).astype(float)
    at = reduce(GeometricMedian(5000, 1e-13), [{"a": point} for point in points], weights.tolist()).values["a"]
    found = objective(points, weights, at)
    others = [oracle(GeometricMedian(), points, weights), *points]
    assert found <= min(objective(points, weights, other) for other in others) * (1 + 1e-7) + 1e-7


def test_more_iterations_come_closer() -> None:
    updates = drawn(9, np.float64)
    points = np.stack([flat(update) for update in updates])
    found = [
        objective(points, np.ones(9), flat(reduce(GeometricMedian(steps, 0.0), updates).values))
        for steps in (1, 2, 4, 50)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2]


@pytest.mark.parametrize("clip_norm", [None, 2.0])
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4])
def test_the_iteration_ends_when_the_point_hardly_moves(tolerance: float, clip_norm: float | None) -> None:
    updates = drawn(9, np.float64, shapes={"a": (50,)})
    kinds = (Mean(), *(GeometricMedian(number, 0.0) for number in range(1, 40)))
    steps = [flat(reduce(kind, updates, clip_norm=clip_norm).values) for kind in kinds]
    moves = [np.linalg.norm(after - before) for before, after in itertools.pairwise(steps)]
    first = next(
        i for i, (move, at) in enumerate(zip(moves, steps[1:], strict=True)) if move < tolerance * np.linalg.norm(at)
    )
    ended = flat(reduce(GeometricMedian(1000, tolerance), updates, clip_norm=clip_norm).values)
    np.testing.assert_array_equal(ended, steps[first + 1])


def test_a_step_from_a_point_that_is_an_update() -> None:
    """Vardi and Zhang's: the update at the mean holds it back with its weight."""
    others = np.array([[0.0, 1.0], [0.0, -1.0], [1.0, 1.0], [1.0, -1.0], [60.0, 7.0]])
    mean = others.mean(axis=0)
    pulls = 1 / np.linalg.norm(others - mean, axis=1)
    target = pulls @ others / pulls.sum()
    back = 1 / (pulls.sum() * np.linalg.norm(target - mean))
    assert back < 1
    updates = [{"a": each} for each in (*others, mean)]
    stepped = reduce(GeometricMedian(1, 0.0), updates).values["a"]
    np.testing.assert_allclose(stepped, (1 - back) * target + back * mean, rtol=1e-9)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("degrees", [115.0, 119.0, 119.9])
def test_a_median_that_is_close_to_an_update(degrees: float) -> None:
    """The corner of 120 degrees itself would be the median."""
    turn = math.radians(degrees)
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [math.cos(turn), math.sin(turn)]])
    at = reduce(GeometricMedian(10_000, 0.0), [{"a": corner} for corner in corners]).values["a"]
    rays = (corners - at) / np.linalg.norm(corners - at, axis=1)[:, None]
    for one, other in itertools.combinations(rays, 2):
        assert one @ other == pytest.approx(-0.5, abs=1e-3)


# Not finite


def test_updates_that_are_not_finite() -> None:
    updates = [{"a": np.array([value, 1.0], np.float32)} for value in (1.0, 2.0, 3.0, 4.0, 5.0, math.inf, math.nan)]
    values = {str(kind): reduce(kind, updates) for kind in KINDS}
    assert np.isnan(values[str(Mean())].values["a"]).tolist() == [True, False]
    assert np.isnan(values[str(Sum())].values["a"]).tolist() == [True, False]
    assert values[str(Median())].values["a"].tolist() == [4.0, 1.0]
    assert values[str(TrimmedMean(0.2))].values["a"].tolist() == [math.inf, 1.0]
    assert reduce(TrimmedMean(0.3), updates).values["a"].tolist() == [4.0, 1.0]
    assert values[str(Krum(2))].values["a"].tolist() in ([2.0, 1.0], [3.0, 1.0], [4.0, 1.0])
    assert values[str(KINDS[-1])].values["a"].tolist() == pytest.approx([3.0, 1.0])
    for kind in (Krum(2), KINDS[-1]):
        assert [each.is_dropped for each in values[str(kind)].updates][-2:] == [True, True]
    assert [each.norm for each in values[str(Mean())].updates][-2:] == [None, None]
    assert [each.cosine for each in values[str(Median())].updates][-2:] == [None, None]
    clipped = reduce(Sum(), updates, clip_norm=1e6)
    assert clipped.values["a"].tolist() == [15.0, 5.0]
    assert [each.is_dropped for each in clipped.updates] == [False] * 5 + [True] * 2


def test_a_mean_beside_a_reported_krum_leaves_out_what_has_no_norm_to_limit() -> None:
    updates = [{"a": np.array([value])} for value in (1.0, 2.0, 3.0, 6.0, math.nan)]
    krum = Krum(1, report_only=True)
    assert reduce(krum, updates, clip_norm=100.0).values["a"].tolist() == [3.0]
    assert np.isnan(reduce(krum, updates).values["a"]).all(), "as any mean"


@pytest.mark.parametrize("kind", [Krum(0), Krum(1, 2), GeometricMedian()], ids=str)
def test_if_all_are_dropped_the_round_changes_nothing(kind: Reduction) -> None:
    updates = [{"a": np.array([math.nan])}] * 5
    reduced = reduce(kind, updates)
    assert not reduced.values
    assert all(each.is_dropped and each.cosine is None for each in reduced.updates)


def test_squares_that_overflow_are_dropped_too() -> None:
    updates = [{"a": np.array([value, 0.0])} for value in (1.0, 2.0, 3.0, 1e200, -1e160)]
    assert reduce(GeometricMedian(), updates).values["a"].tolist() == [2.0, 0.0]
    assert [each.is_dropped for each in reduce(Krum(1, 3), updates).updates] == [False] * 3 + [True] * 2


def test_signs_of_zeros_and_nan_do_not_depend_on_their_order() -> None:
    nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    for values in itertools.permutations([0.0, -0.0, -0.0]):
        (value,) = reduce(Median(), [{"a": np.array([each])} for each in values]).values["a"]
        assert not np.signbit(value)
    bits = set()
    for arrays in itertools.permutations([nan, -nan, np.array([1.0])]):
        bits.add(reduce(Median(), [{"a": each} for each in arrays]).values["a"].view(np.uint64).item())
    assert len(bits) == 1


# The same bits


@pytest.fixture(scope="module")
def many() -> list[Arrays]:
    return drawn(8, shapes={"w": (3, choices.BLOCK + 77), "b": (17,), "v": (choices.BLOCK,)})


def bits(reduced: Reduced) -> tuple[Any, ...]:
    return (reduced.report, {name: each.tobytes() for name, each in reduced.values.items()})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_on_any_number_of_threads(kind: Reduction, many: list[Arrays]) -> None:
    expected = bits(reduce(kind, many, weights_of(8), clip_norm=400.0))
    for threads in (1, 2, 5):
        with closing(ForkJoin(threads)) as parallel:
            in_threads = reduce(kind, many, weights_of(8), clip_norm=400.0, parallel=Stepper(parallel).map)
            assert bits(in_threads) == expected


@pytest.mark.parametrize("clip_norm", [None, 400.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_on_several_servers(kind: Reduction, clip_norm: float | None, many: list[Arrays]) -> None:
    """The home has a row, and some elements of a vector; it gets only numbers of the rest, and tells what counts."""
    weights, names = weights_of(8), list(many[0])
    here = [{"w": each["w"][:1], "b": each["b"][:0], "v": each["v"][:30_001]} for each in many]
    there = [{"w": each["w"][1:], "b": each["b"], "v": each["v"][30_001:]} for each in many]
    norms = [[measured_norm(each)] for each in there]
    distances = [[terms] for at, each in enumerate(there) for terms in measured_distances(each, there[at + 1 :])]
    elsewhere = Elsewhere(*json.loads(json.dumps((norms, distances))))
    home, found = reduce_updates(kind, names, here, weights, clip_norm=clip_norm, elsewhere=elsewhere)
    divisor, order, note = choices.plan(kind, 8, by_count=False)
    scales, factors = [tuple([getattr(each, name) for each in found.updates]) for name in ("scale", "factor")]
    away = reduce_as_decided(choices.Decision(scales, factors, divisor, order, (False,) * 8, note), names, there)
    whole, report = reduce_updates(kind, names, many, weights, clip_norm=clip_norm)
    assert found == replace(report, updates=tuple([replace(each, cosine=None) for each in report.updates]))
    for name in names:
        assert np.concatenate([home[name], away[name]]).tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_sums_are_exact(is_compiled: bool) -> None:
    """Numbers of all magnitudes, cut anywhere, are added in any order."""
    adder = ExactSums()
    if is_compiled:
        adder.prepare(lambda: False)
    for size, top in ((1, 0), (7, 1000), (1000, -1060), (65_536, 300)):
        rng = np.random.default_rng(size)
        values = np.ldexp(rng.random(size), rng.integers(-1074, top, size))
        expected = sum(map(Fraction, values.tolist()))
        found = [adder.of_rows(part.reshape(1, -1).copy()) for part in np.split(values, [size // 3, size // 2])]
        for rows in (found, found[::-1]):
            assert sum(map(Fraction, sums(rows)[0])) == expected
        assert rounded(*[terms for (terms,) in found]) == float(expected)
    for wrong in (math.inf, math.nan, 1e308):
        assert adder.of_rows(np.array([[1.0, wrong, 1e308]])) == [(math.inf,)]


def test_distances_of_scaled_updates_do_not_cancel() -> None:
    one, other = np.full(7, 3.0), np.full(7, 2.0 + 1e-6)
    updates = [{"a": one}, {"a": other}]
    distances, norms = measured_distances(updates[0], updates[1:]), [measured_norm(each) for each in updates]
    (found,) = choices.scaled_distances(distances, norms, [2 / 3, 1.0])
    assert found == pytest.approx(7 * float(Fraction(2 / 3) * 3 - Fraction(2.0 + 1e-6)) ** 2, rel=1e-3)


def test_totals_are_not_compensated() -> None:
    assert choices.total([[1.0], [1e100], [1.0], [-1e100]]) == [0.0]


def test_distances_of_close_updates_do_not_cancel() -> None:
    one = np.full(70_000, 1000.0, np.float32)
    other = np.nextafter(one, np.float32(2000))
    (terms,) = choices.squared_distances([one, other])
    assert rounded(terms) == pytest.approx(70_000 * float(other[0] - one[0]) ** 2, rel=1e-12)


def test_results_are_rounded_once() -> None:
    """2^24 + 1 is no float32, but the mean of float32 values may need it on the way."""
    updates = [{"a": np.array([value], np.float32)} for value in (2.0**24, 1.0, 1.0, 0.0)]
    assert reduce(Sum(), updates).values["a"].tolist() == [2.0**24 + 2]


# Flower


@pytest.fixture(scope="module")
def flower() -> Mapping[str, NDArray[Any]]:
    with np.load("tests/golden/flower_reductions.npz") as file:
        return dict(file)


def flower_updates(flower: Mapping[str, NDArray[Any]], prefix: str) -> list[Arrays]:
    layers = [flower[f"{prefix}-{index}"] for index in range(3)]
    return [{str(index): layer[number] for index, layer in enumerate(layers)} for number in range(len(layers[0]))]


def close(values: Mapping[str, NDArray[Any]], expected: Iterable[NDArray[Any]], dtype: str) -> None:
    tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
    for value, each in zip(values.values(), expected, strict=True):
        np.testing.assert_allclose(value, each, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [7, 10, 11])
def test_median_and_trimmed_mean_are_flowers(flower: Mapping[str, NDArray[Any]], count: int, dtype: str) -> None:
    updates = flower_updates(flower, f"{dtype}-{count}")
    close(reduce(Median(), updates).values, [flower[f"{dtype}-{count}-{i}-median"] for i in range(3)], dtype)
    for fraction in (0.0, 0.1, 0.2, 0.25, 0.3, 0.49):
        expected = [flower[f"{dtype}-{count}-{i}-trimmed-{fraction}"] for i in range(3)]
        close(reduce(TrimmedMean(fraction), updates).values, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_krum_is_flowers(flower: Mapping[str, NDArray[Any]], dtype: str) -> None:
    """Rounds of fewer than 2 f + 3 updates differ: Flower goes on with Krum."""
    selected = json.loads(str(flower["manifest"]))["selected"]
    names = [name for name in selected if name.startswith(dtype)]
    assert len(names) == 7
    for name in names:
        count, _, num_byzantine, num_selected = name.removeprefix(f"{dtype}-").split("-")
        krum = Krum(int(num_byzantine), int(num_selected))
        weights = [1.0 + number % 3 for number in range(int(count))]
        reduced = reduce(krum, flower_updates(flower, f"{dtype}-{count}"), weights)
        assert [number for number, each in enumerate(reduced.updates) if not each.is_dropped] == selected[name]
        close(reduced.values, [flower[f"{name}-{index}"] for index in range(3)], dtype)


def test_krum_of_close_updates_is_not_flowers(flower: Mapping[str, NDArray[Any]]) -> None:
    """Flower expands (a - b)^2 in float32, where nothing is left of the distances of close updates."""
    updates = flower_updates(flower, "offset")
    points = np.stack([flat(update) for update in updates])
    reduced = reduce(Krum(3, 5), updates)
    kept = [number for number, each in enumerate(reduced.updates) if not each.is_dropped]
    assert kept == krum_oracle(points, Krum(3, 5))
    assert kept != json.loads(str(flower["manifest"]))["selected"]["offset"]


# Refused

SIX_OF_NINE = RoundRules(9, min_required=6, deadline=1.0)


@together(
    "make, field, message",
    *zip(
        (lambda: TrimmedMean(0.5), "reduction.trimmed_mean.fraction", "less than 0.5, got 0.5"),
        (lambda: TrimmedMean(-0.1), "reduction.trimmed_mean.fraction", "got -0.1"),
        (lambda: TrimmedMean(math.nan), "reduction.trimmed_mean.fraction", "got nan"),
        (lambda: Krum(-1), "reduction.krum.num_byzantine", "got -1"),
        (lambda: Krum(1, 0), "reduction.krum.num_selected", "got 0"),
        (lambda: GeometricMedian(0), "reduction.geometric_median.max_iterations", "got 0"),
        (lambda: GeometricMedian(10_001), "reduction.geometric_median.max_iterations", "from 1 to 10000"),
        (lambda: GeometricMedian(1, -1.0), "reduction.geometric_median.tolerance", "got -1"),
        (lambda: GeometricMedian(1, math.nan), "reduction.geometric_median.tolerance", "got nan"),
        (lambda: GeometricMedian(1, 1.0), "reduction.geometric_median.tolerance", "less than 1, got 1"),
        (lambda: Mean().check_options(by_count=False, clip_norm=0.0), "spec.clip_norm", "got 0"),
        (lambda: Median().check_options(by_count=False, clip_norm=math.inf), "spec.clip_norm", "got inf"),
        (lambda: Mean().check_options(by_count=False, clip_norm=math.nan), "spec.clip_norm", "got nan"),
        (lambda: Sum().check_options(by_count=True, clip_norm=None), "spec.normalization", "with sum, got COUNT"),
        (lambda: Median().check_options(by_count=True, clip_norm=None), "spec.normalization", "with median"),
        (lambda: Krum(1).check_options(by_count=True, clip_norm=None), "spec.normalization", "with krum"),
        (
            lambda: Krum(1).check_rounds(RoundRules(4)),
            "spec.reduction.krum.num_byzantine",
            "num_required=4: .*one wrong",
        ),
        (
            lambda: Krum(2, report_only=True).check_rounds(SIX_OF_NINE),
            "spec.reduction.krum.num_byzantine",
            "= 7 updates .* got min_required=6: in smaller ones, 2 wrong updates",
        ),
        (
            lambda: Krum(1, 5).check_rounds(RoundRules(5)),
            "spec.reduction.krum.num_selected",
            "at most .* = 4, got 5",
        ),
        (lambda: Krum(0).check_update({"a"}, ["a", "b"]), "update", r"all 2 components .* without \['b'\]"),
        (lambda: GeometricMedian().check_update((), ["a"], "x"), "x", "geometric_median"),
        strict=True,
    ),
)
def test_what_makes_no_sense(make: Callable[[], Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make()
    assert caught.value.field == field


def test_what_makes_sense() -> None:
    Krum(1, 4).check_rounds(RoundRules(5))
    Krum(1, report_only=True).check_options(by_count=True, clip_norm=2.0)
    Mean().check_options(by_count=True, clip_norm=None)
    Median().check_options(by_count=False, clip_norm=1e-9)
    Median().check_rounds(RoundRules(1))
    Median().check_update({"a"}, ["a", "b"])
    Krum(0).check_update({"b", "a"}, ["a", "b"])
    assert [kind.holds_updates for kind in KINDS] == [False, False, True, True, True, True, True, True]
    assert [kind.needs_all_components for kind in KINDS] == [False, False, False, False, False, True, True, True]


@pytest.mark.parametrize("kind", [*KINDS, Krum(3, 2, report_only=True), TrimmedMean(0.0)], ids=str)
def test_records(kind: Reduction) -> None:
    assert reduction_of(json.loads(json.dumps(reduction_record(kind)))) == kind


@together("wrong", [{}, {"name": "best"}, {"name": "krum"}, {"name": "mean", "fraction": 0.1}, {"name": None}])
def test_damaged_records(wrong: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError)):
        reduction_of(wrong)
