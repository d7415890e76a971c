"""Makes one update of those that are held for a round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradserve_server.parameters.reductions.choices import (
    BLOCK,
    Array,
    Decision,
    Parallel,
    clip_scales,
    decide,
    is_measurable,
    load,
    needs_distances,
    products,
    scaled_distances,
    squared_distances,
    squared_norms,
    total,
)
from gradserve_server.parameters.reductions.exact import ExactSums, Terms, rounded, sums
from gradserve_server.parameters.reductions.spec import Maximum, Median, Reduction, TrimmedMean

_SORTED_ELEMENTS = 1 << 20
_LEAST_SORTED = 1 << 10


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The part of one update in a round.

    Attributes:
        norm: Its norm over all components, before clip_norm; None if it is infinite or NaN.
        scale: The factor by which clip_norm scaled it.
        cosine: The cosine of the angle between it and the reduced update, over the components that it has; None if one
            of them is zero, infinite or NaN, or has pieces on other servers.
        is_dropped: Whether the reduction left it out, or would have with report_only.
        factor: Its factor in the reduced update, `scale` not included; see `Decision`.
    """

    norm: float | None
    scale: float
    cosine: float | None
    is_dropped: bool
    factor: float


@dataclass(frozen=True, slots=True)
class Report:
    """The parts of all updates in a round.

    Attributes:
        updates: The report of each update, in their order.
        note: The reason why another reduction than the chosen one was used; None if it was that one.
    """

    updates: tuple[UpdateReport, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Measurements of the updates of a round by other servers: of each number, the parts to be added to it.

    Attributes:
        norms: Of the squared norm of each update.
        distances: Of the squared distances of each pair of updates; see `squared_distances`.
    """

    norms: Sequence[Sequence[Terms]] = ()
    distances: Sequence[Sequence[Terms]] = ()


def reduce_updates(
    reduction: Reduction,
    names: Sequence[str],
    updates: Sequence[Mapping[str, Array]],
    weights: Sequence[float],
    *,
    by_count: bool = False,
    clip_norm: float | None = None,
    elsewhere: Elsewhere | None = None,
    parallel: Parallel = map,
    exact: ExactSums | None = None,
) -> tuple[dict[str, Array], Report]:
    """Reduces the updates of a round.

    Blocks for as long as it takes to read all updates up to three times; for Krum and geometric medians, to compute all
    distances as well. Beside the result, it uses memory for a few blocks: at most 512 KiB for each update and thread,
    and as much again for distances.

    Args:
        reduction: The reduction.
        names: The names of all components, in the order of the spec.
        updates: The updates, in an order that is the same whenever the result is to be: components by name, of float16,
            bfloat16, float32 or float64, C-contiguous. A component has the same shape and dtype in all updates that
            have it; they passed `check_update`.
        weights: The weights of the updates, positive and finite.
        by_count: Whether a mean is divided by the number of updates rather than by their weights.
        clip_norm: The greatest norm of an update over all components: those with a greater one are scaled down to it,
            before anything else. None for no limit.
        elsewhere: What was measured of the pieces on other servers; None if there are none.
        parallel: Runs blocks, perhaps in threads. The result does not depend on it.
        exact: Adds squares up. None: with NumPy alone, which gives the same result.

    Returns:
        The components of the reduced update, without those that no update has: float64 for those of that dtype,
        float32 for others; and the report.
    """
    columns = {name: [update.get(name) for update in updates] for name in names}
    others = Elsewhere() if elsewhere is None else elsewhere
    squares = _added([squared_norms(arrays, parallel, exact) for arrays in columns.values()], others.norms)
    norms = [rounded(terms) for terms in squares] or [0.0] * len(updates)
    distances: list[float] = []
    if needs_distances(reduction, len(updates)):
        found = [squared_distances([update[name] for update in updates], None, parallel, exact) for name in names]
        pairs = _added(found, others.distances)
        distances = scaled_distances(pairs, squares, clip_scales(norms, clip_norm))
    decision = decide(reduction, weights, norms, distances, by_count=by_count, clip_norm=clip_norm)
    values = reduce_as_decided(decision, names, updates, parallel)
    if elsewhere is not None:
        nothing = [0.0] * len(updates)
        return values, report(norms, nothing, nothing, decision)
    cosines = [products(arrays, values.get(name), parallel) for name, arrays in columns.items()]
    return values, report(norms, total(dots for dots, _ in cosines), total(each for _, each in cosines), decision)


def _added(found: Sequence[Sequence[Terms]], elsewhere: Sequence[Sequence[Terms]]) -> list[Terms]:
    """Adds the sums of components, and what there is elsewhere for each of them."""
    return sums([*found, *zip(*elsewhere, strict=True)])


def reduce_as_decided(
    decision: Decision, names: Sequence[str], updates: Sequence[Mapping[str, Array]], parallel: Parallel = map
) -> dict[str, Array]:
    """Returns the components of the reduced update; see `reduce_updates`."""
    found = {name: reduce_component([update.get(name) for update in updates], decision, parallel) for name in names}
    return {name: reduced for name, reduced in found.items() if reduced is not None}


def measured_norm(update: Mapping[str, Array], parallel: Parallel = map, exact: ExactSums | None = None) -> Terms:
    """Returns the squared norm of an update, over the components that are here."""
    return next(iter(sums([squared_norms([array], parallel, exact) for array in update.values()])), (0.0,))


def measured_distances(
    update: Mapping[str, Array],
    others: Sequence[Mapping[str, Array]],
    parallel: Parallel = map,
    exact: ExactSums | None = None,
) -> list[Terms]:
    """Returns the squared distances of an update to others, over the components that are here, which all have."""
    found = [
        squared_distances([array, *[other[name] for other in others]], 1, parallel, exact)
        for name, array in update.items()
    ]
    return sums(found) or [(0.0,)] * len(others)


def clip_scale(squared_norm: float, clip_norm: float) -> float:
    """Returns the factor that scales an update down to `clip_norm`, for sums that hold no updates.

    Args:
        squared_norm: Its squared norm over all components.
        clip_norm: The greatest norm.

    Returns:
        At most 1; 0 for an update that must not be added, as its norm is infinite or NaN.
    """
    return clip_scales([squared_norm], clip_norm)[0] if is_measurable(squared_norm) else 0.0


def report(norms: Sequence[float], dots: Sequence[float], squares: Sequence[float], decision: Decision) -> Report:
    """Returns the report of a round.

    Args:
        norms: Their squared norms over all components.
        dots: Their products with the reduced update.
        squares: The squared norms of the reduced update, over the components of each.
        decision: The decision by which they were reduced.
    """
    updates = tuple(
        UpdateReport(norm_of(norm), scale, _cosine(dot, norm, square), is_dropped, factor)
        for norm, dot, square, scale, is_dropped, factor in zip(
            norms, dots, squares, decision.scales, decision.is_dropped, decision.factors, strict=True
        )
    )
    return Report(updates, decision.note)


def norm_of(squared_norm: float) -> float | None:
    """Returns a norm; None if it is not finite."""
    return math.sqrt(squared_norm) if math.isfinite(squared_norm) else None


def _cosine(dot: float, norm: float, square: float) -> float | None:
    length = math.sqrt(norm) * math.sqrt(square) if norm < math.inf and square < math.inf else 0.0
    return max(-1.0, min(dot / length, 1.0)) if length and math.isfinite(dot) else None


def reduce_component(arrays: Sequence[Array | None], decision: Decision, parallel: Parallel = map) -> Array | None:
    """Reduces one component as was decided.

    Args:
        arrays: The component in each update, None for one that lacks it.
        decision: The decision for the whole round.
        parallel: Runs blocks, perhaps in threads.

    Returns:
        The component in float64 if it is of that dtype, in float32 otherwise; None if no update that counts has it.
    """
    counting = [index for index, array in enumerate(arrays) if array is not None and decision.factors[index]]
    present = [array for index in counting if (array := arrays[index]) is not None]
    if not present:
        return None
    scales = [decision.scales[index] for index in counting]
    out = np.empty(present[0].shape, np.float64 if present[0].dtype == np.float64 else np.float32)
    if decision.order is not None:
        _fill_in_order(out, present, scales, decision.order, parallel)
        return out
    factors = [decision.factors[index] for index in counting]
    divisor = 1.0
    if decision.divisor == "weights":
        ((divisor,),) = (total([[factor] for factor in factors]),)
    elif decision.divisor == "count":
        divisor = float(len(factors))
    _fill_sum(out, present, [scale * factor for scale, factor in zip(scales, factors, strict=True)], divisor, parallel)
    return out


def _fill_sum(
    out: Array, arrays: Sequence[Array], factors: Sequence[float], divisor: float, parallel: Parallel
) -> None:
    flat = out.reshape(-1)

    def fill(start: int) -> None:
        with np.errstate(all="ignore"):
            (sums,) = load(arrays[:1], start, factors[:1])
            for array, factor in zip(arrays[1:], factors[1:], strict=True):
                sums += load([array], start, [factor])[0]
            if divisor != 1:
                sums /= divisor
            flat[start : start + BLOCK] = sums

    for _ in parallel(fill, range(0, flat.size, BLOCK)):
        pass


def _fill_in_order(
    out: Array,
    arrays: Sequence[Array],
    scales: Sequence[float],
    order: Median | TrimmedMean | Maximum,
    parallel: Parallel,
) -> None:
    flat = out.reshape(-1)
    count = len(arrays)
    first, *others = order.kept(count)
    width = max(min(BLOCK, _SORTED_ELEMENTS // count), _LEAST_SORTED)

    def fill(start: int) -> None:
        stop = min(start + width, flat.size)
        with np.errstate(all="ignore"):
            values = np.empty((stop - start, count))
            for column, (array, scale) in enumerate(zip(arrays, scales, strict=True)):
                values[:, column] = array.reshape(-1)[start:stop]
                if scale != 1:
                    values[:, column] *= scale
            # Zeros and NaN of either sign are equal, so processors may sort them differently: they become the same.
            values += 0.0
            values[np.isnan(values)] = np.nan
            values.sort(axis=1)
            sums = values[:, first].copy()
            for column in others:
                sums += values[:, column]
            sums /= 1 + len(others)
            flat[start:stop] = sums

    for _ in parallel(fill, range(0, flat.size, width)):
        pass
