"""Decides how much each update of a round counts, by its norm and its distances from others over all components.

Norms and distances are exact sums, so servers of sharded parameters can measure the pieces that they have; see `exact`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, repeat
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.parameters.reductions.exact import ExactSums, Terms, rounded, sums
from gradserve_server.parameters.reductions.spec import (
    GeometricMedian,
    Krum,
    Maximum,
    Median,
    Reduction,
    Sum,
    TrimmedMean,
)

Array: TypeAlias = NDArray[Any]
"""An array of float16, bfloat16, float32 or float64, C-contiguous."""
T = TypeVar("T")
R = TypeVar("R")

BLOCK = 1 << 16
"""The elements of an update whose squares are added before those of the next block: the sums depend on it."""


class Parallel(Protocol):
    """Calls a function for each of some arguments; returns the results in their order, as `map` does."""

    def __call__(self, function: Callable[[T], R], arguments: Iterable[T], /) -> Iterable[R]: ...


def squared_norms(
    arrays: Sequence[Array | None], parallel: Parallel = map, exact: ExactSums | None = None
) -> list[Terms]:
    """Returns the sums of squares of a component, one for each update; 0 for one that lacks it."""
    exact = exact or ExactSums()
    present = [index for index, array in enumerate(arrays) if array is not None]

    def of_block(start: int) -> list[Terms]:
        rows = load([array for array in arrays if array is not None], start)
        rows *= rows
        return exact.of_rows(rows)

    found = sums(_of_blocks(of_block, arrays, parallel)) or [(0.0,)] * len(present)
    norms: list[Terms] = [(0.0,)] * len(arrays)
    for index, value in zip(present, found, strict=True):
        norms[index] = value
    return norms


def squared_distances(
    arrays: Sequence[Array],
    num_firsts: int | None = None,
    parallel: Parallel = map,
    exact: ExactSums | None = None,
) -> list[Terms]:
    """Returns the squared distances of updates in a component, by direct differences.

    Args:
        arrays: The component, in each update.
        num_firsts: The number of updates whose distances to all later ones are wanted; None for all.
        parallel: Runs blocks, perhaps in threads.
        exact: Adds up. None: with NumPy alone.

    Returns:
        One sum for each pair of updates: 0 and 1, 0 and 2, ..., 1 and 2, ...
    """
    exact = exact or ExactSums()
    firsts = range(len(arrays) - 1)[:num_firsts]

    def of_block(start: int) -> list[Terms]:
        rows = load(arrays, start)
        found: list[Terms] = []
        for index in firsts:
            differences = rows[index + 1 :] - rows[index]
            differences *= differences
            found += exact.of_rows(differences)
        return found

    num_pairs = sum([len(arrays) - 1 - index for index in firsts])
    return sums(_of_blocks(of_block, arrays, parallel)) or [(0.0,)] * num_pairs


def scaled_distances(distances: Sequence[Terms], norms: Sequence[Terms], scales: Sequence[float]) -> list[float]:
    """Returns the squared distances of pairs of updates that are scaled by `clip_scales`.

    |s a - t b|^2 = s t |a - b|^2 + (s - t) (s |a|^2 - t |b|^2), in rational numbers: nothing cancels.
    """
    found = []
    for (i, j), terms in zip(combinations(range(len(norms)), 2), distances, strict=True):
        value, s, t = rounded(terms), scales[i], scales[j]
        if (s != 1 or t != 1) and math.isfinite(value) and math.isfinite(rounded(norms[i]) + rounded(norms[j])):
            distance, a, b = (sum(map(Fraction, each), Fraction(0)) for each in (terms, norms[i], norms[j]))
            first, second = Fraction(s), Fraction(t)
            value = float(first * second * distance + (first - second) * (first * a - second * b))
        found.append(value)
    return found


def products(
    arrays: Sequence[Array | None], reduced: Array | None, parallel: Parallel = map
) -> tuple[list[float], list[float]]:
    """Returns the products of updates with the reduced one in a component, and the sums of squares of the latter.

    Both have one number for each update, which is 0 for one that lacks the component.
    """
    dots, squares = [0.0] * len(arrays), [0.0] * len(arrays)
    present = [index for index, array in enumerate(arrays) if array is not None]
    if reduced is None or not present:
        return dots, squares

    def of_block(start: int) -> list[float]:
        rows = load([*(array for array in arrays if array is not None), reduced], start)
        rows[:-1] *= rows[-1]
        rows[-1] *= rows[-1]
        return row_sums(rows)

    *found, square = total(_of_blocks(of_block, [reduced], parallel)) or [0.0] * (len(present) + 1)
    for index, value in zip(present, found, strict=True):
        dots[index], squares[index] = value, square
    return dots, squares


def total(numbers: Iterable[Sequence[float]]) -> list[float]:
    """Adds numbers of components, or of blocks, in their order.

    Not by `sum`, which compensates rounding from Python 3.12 on.
    """
    totals: list[float] = []
    for each in numbers:
        totals = [before + value for before, value in zip(totals, each, strict=True)] if totals else list(each)
    return totals


def load(arrays: Sequence[Array], start: int, scales: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Returns a block of a component in float64, with a row for each update."""
    stop = min(start + BLOCK, arrays[0].size)
    rows = np.empty((len(arrays), stop - start))
    for row, array, scale in zip(rows, arrays, repeat(1.0) if scales is None else scales, strict=False):
        row[:] = array.reshape(-1)[start:stop]
        if scale != 1:
            row *= scale
    return rows


def row_sums(rows: NDArray[np.float64]) -> list[float]:
    """Returns the sum of each row, by adding its halves to each other until one element is left. Changes the rows.

    NumPy's own sums may add in another order with another version or processor.
    """
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    sums: list[float] = rows[:, 0].tolist()
    return sums


def _of_blocks(
    of_block: Callable[[int], list[T]], arrays: Sequence[Array | None], parallel: Parallel
) -> Iterable[list[T]]:
    size = next((array.size for array in arrays if array is not None), 0)

    def quietly(start: int) -> list[T]:
        with np.errstate(all="ignore"):  # what is not finite is dropped later
            return of_block(start)

    return parallel(quietly, range(0, size, BLOCK))


Vector: TypeAlias = NDArray[np.float64]

Divisor: TypeAlias = Literal["weights", "count", "none"]

_NEAR = 1e-7
"""The distance to an update, as a part of the greatest distance between updates, at which a point counts as equal to
it: distances of points are the roots of differences of squares, which rounding leaves uncertain below 1e-8."""

_GREATEST_SQUARE = 2.0**1021
"""The greatest squared norm of which all squared distances are finite."""


@dataclass(frozen=True)
class Decision:
    """The part that each update has in the result; all servers of sharded parameters make their components by it.

    Attributes:
        scales: The factors that limit norms.
        factors: The weights of the updates, `scales` not included; 0 for one that does not count.
        divisor: The divisor of a sum with these factors: "weights" for the sum of the factors of the updates that have
            a component, "count" for their number, "none" for 1.
        order: The reduction of elements in order, in place of a sum; updates with the factor 0 do not count.
        is_dropped: Whether the reduction left an update out, or would have.
        note: The reason why another reduction than the chosen one was used; None if it was that one.
    """

    scales: tuple[float, ...]
    factors: tuple[float, ...]
    divisor: Divisor
    order: Median | TrimmedMean | Maximum | None
    is_dropped: tuple[bool, ...]
    note: str | None = None


def is_measurable(squared_norm: float) -> bool:
    """Returns True if an update with this squared norm has finite distances to others."""
    return squared_norm <= _GREATEST_SQUARE


def clip_scales(squared_norms: Sequence[float], clip_norm: float | None) -> list[float]:
    """Returns the factors by which updates get norms of at most `clip_norm`; 1 for those that `decide` drops."""
    if clip_norm is None:
        return [1.0] * len(squared_norms)
    norms = [math.sqrt(each) if is_measurable(each) else 0.0 for each in squared_norms]
    return [clip_norm / norm if norm > clip_norm else 1.0 for norm in norms]


def needs_distances(reduction: Reduction, num_updates: int) -> bool:
    """Returns True if `decide` needs distances for a round of so many updates."""
    if isinstance(reduction, Krum):
        return num_updates >= reduction.num_needed
    return isinstance(reduction, GeometricMedian)


def plan(
    reduction: Reduction, num_updates: int, *, by_count: bool
) -> tuple[Divisor, Median | TrimmedMean | Maximum | None, str | None]:
    """Returns what is known of a decision before anything is measured: its divisor, order and note."""
    divisor: Divisor = "count" if by_count else "weights"
    match reduction:
        case Sum() | GeometricMedian():
            divisor = "none"
        case Median() | TrimmedMean() | Maximum():
            return divisor, reduction, None
        case Krum() if num_updates < reduction.num_needed:
            instead = "nothing" if reduction.report_only else "median"
            note = f"krum of fewer than {reduction.num_needed} updates: {instead}"
            return divisor, None if reduction.report_only else Median(), note
    return divisor, None, None


def decide(
    reduction: Reduction,
    weights: Sequence[float],
    squared_norms: Sequence[float],
    squared_distances: Sequence[float] = (),
    *,
    by_count: bool = False,
    clip_norm: float | None = None,
) -> Decision:
    """Decides how much each update counts.

    An update whose norm is infinite or NaN (see ParametersSpec.accept_non_finite), or above 1e153, is dropped wherever
    norms or distances count: with clip_norm, by Krum, where it is one of the Byzantine ones, and from a geometric
    median. The mean and the sum become as infinite or NaN as it is; median, trimmed mean and maximum take NaN as
    greater than all else. If all updates are dropped, the result has no components, and the round changes nothing.

    Krum of fewer than 2 f + 3 updates becomes the median of each element, which any f of 2 f + 1 updates cannot move
    beyond the others; a Krum that is only reported drops none then.

    Args:
        reduction: The reduction.
        weights: The weights of the updates.
        squared_norms: Their squared norms over all components.
        squared_distances: The squared distances of each pair, scaled; see `needs_distances` and `scaled_distances`.
        by_count: Whether a mean is divided by the number of updates rather than by their weights.
        clip_norm: The greatest norm of an update; None for no limit.
    """
    count = len(weights)
    scales = tuple(clip_scales(squared_norms, clip_norm))
    must_be_finite = clip_norm is not None or reduction.needs_all_components
    is_usable = [not must_be_finite or is_measurable(each) for each in squared_norms]
    usable = [index for index in range(count) if is_usable[index]]
    factors = [weight if counts else 0.0 for weight, counts in zip(weights, is_usable, strict=True)]
    dropped = [not counts for counts in is_usable]
    divisor, order, note = plan(reduction, count, by_count=by_count)
    match reduction:
        case Krum():
            selected = usable
            if count >= reduction.num_needed:
                rest = _Distances(count, squared_distances).among(usable)
                selected = [usable[index] for index in krum_selection(rest, reduction, count - len(usable))]
            dropped = [index not in set(selected) for index in range(count)]
            if reduction.report_only:
                # The mean, without those that are not finite only if clip_norm needs that.
                keeps_all = clip_norm is None
                factors = [weight if keeps_all or is_usable[index] else 0.0 for index, weight in enumerate(weights)]
            elif order is None:
                alone = len(selected) == 1  # multiplying and dividing by its weight could change the last bit
                factors = [0.0 if out else 1.0 if alone else weights[i] for i, out in enumerate(dropped)]
        case GeometricMedian():
            rest = _Distances(count, squared_distances).among(usable)
            norms = [squared_norms[index] * scales[index] ** 2 for index in usable]
            shares = geometric_median_shares(rest, norms, [weights[index] for index in usable], reduction)
            factors = [0.0] * count
            for index, share in zip(usable, shares, strict=True):
                factors[index] = share
    return Decision(scales, tuple(factors), divisor, order, tuple(dropped), note)


class _Distances:
    """A matrix of squared distances, from the numbers of each pair."""

    def __init__(self, count: int, pairs: Sequence[float]) -> None:
        self.matrix = np.zeros((count, count))
        upper = np.triu_indices(count, 1)
        self.matrix[upper] = pairs
        self.matrix.T[upper] = pairs

    def among(self, indices: Sequence[int]) -> Vector:
        """Returns the distances of some updates."""
        return self.matrix[np.ix_(indices, indices)]


def krum_selection(squared_distances: Vector, krum: Krum, num_known: int = 0) -> list[int]:
    """Returns the indices of the updates that Krum selects, in order.

    Args:
        squared_distances: The matrix of squared distances of the updates.
        krum: The reduction.
        num_known: The number of Byzantine updates that were found before, and are not among these.
    """
    count = len(squared_distances)
    num_closest = max(1, count - max(krum.num_byzantine - num_known, 0) - 2)
    scores = []
    for index, row in enumerate(squared_distances.tolist()):
        score = 0.0
        for distance in sorted(row[:index] + row[index + 1 :])[:num_closest]:
            score += distance
        scores.append(score)
    best = sorted(range(count), key=lambda index: (scores[index], index))
    return sorted(best[: krum.num_selected])


def geometric_median_shares(
    squared_distances: Vector, squared_norms: Sequence[float], weights: Sequence[float], median: GeometricMedian
) -> list[float]:
    """Returns the geometric median of updates as a mean of them: their shares, which are at least 0 and add up to 1.

    Weiszfeld's iteration, which also leaves and reaches points that are updates (Vardi and Zhang, 2000). All its points
    are means of the updates, and squared distances of means follow from those of the updates: so it needs none of the
    components, and servers exchange distances once rather than in each step.

    Args:
        squared_distances: The matrix of squared distances of the updates.
        squared_norms: Their squared norms.
        weights: Their weights.
        median: The reduction.
    """
    count = len(weights)
    if count < 2:
        return [1.0] * count
    points = _Means(squared_distances, squared_norms, weights)
    closest = points.shares_of(points.best())
    if points.step(closest) is None:
        return _listed(closest)
    shares = points.mean
    for _ in range(median.max_iterations):
        following = points.step(shares)
        if following is None:
            break
        moved = points.squared_length(following - shares)
        shares = following
        if moved < median.tolerance**2 * points.squared_norm(shares):
            break
    return _listed(shares)


class _Means:
    """Weighted means of points, of which only the squared distances are known; each is an array of shares."""

    def __init__(self, squared_distances: Vector, squared_norms: Sequence[float], weights: Sequence[float]) -> None:
        # A power of two makes all squares small, so that none overflows, and changes no digit.
        norms = np.array(squared_norms, np.float64)
        exponent = math.frexp(float(max(norms.max(), squared_distances.max())))[1]
        self._squares = np.ldexp(squared_distances, -exponent)
        self._norms = np.ldexp(norms, -exponent)
        # Only the ratios of weights count.
        self._weights = np.array(weights, np.float64) / max(weights)
        self._near = _NEAR * math.sqrt(float(self._squares.max()))

    @property
    def mean(self) -> Vector:
        """The weighted mean."""
        return self._weights / _sum(self._weights)

    def shares_of(self, index: int) -> Vector:
        """Returns a point itself."""
        shares = np.zeros(len(self._weights))
        shares[index] = 1.0
        return shares

    def best(self) -> int:
        """Returns the index of the point with the smallest weighted sum of distances."""
        return int(np.argmin(row_sums(np.sqrt(self._squares) * self._weights)))

    def squared_distances(self, shares: Vector) -> Vector:
        """Returns the squared distances of a mean to all points."""
        to_points = np.array(row_sums(self._squares * shares))
        return np.maximum(to_points - 0.5 * _sum(to_points * shares), 0.0)

    def squared_norm(self, shares: Vector) -> float:
        """Returns the squared norm of a mean."""
        to_points = np.array(row_sums(self._squares * shares))
        return max(_sum(self._norms * shares) - 0.5 * _sum(to_points * shares), 0.0)

    def squared_length(self, change: Vector) -> float:
        """Returns the squared distance of two means, given the difference of their shares."""
        return max(-0.5 * _sum(np.array(row_sums(self._squares * change)) * change), 0.0)

    def step(self, shares: Vector) -> Vector | None:
        """Returns the next mean of Weiszfeld's iteration; None if this one is the geometric median."""
        distances = np.sqrt(self.squared_distances(shares))
        is_near = distances <= self._near
        if is_near.all():
            return None
        pulls = np.where(is_near, 0.0, self._weights / np.where(is_near, 1.0, distances))
        pull = _sum(pulls.copy())
        following = pulls / pull
        if not is_near.any():
            return following
        # The points here hold the mean back with their weights; the others pull it away.
        holding = _sum(np.where(is_near, self._weights, 0.0))
        pulling = pull * math.sqrt(self.squared_length(following - shares))
        if pulling <= holding:
            return None
        back = holding / pulling
        return (1.0 - back) * following + back * shares


def _sum(values: Vector) -> float:
    return row_sums(values.reshape(1, -1).copy())[0]


def _listed(shares: Vector) -> list[float]:
    found: list[float] = shares.tolist()
    return found
