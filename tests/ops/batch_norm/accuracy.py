"""Inputs that are hard to add up, and the bounds of docs/fused_batch_norm_accuracy.md for the sums of FusedBatchNorm.

Nothing here is pytest's: processes that compute for another processor check the same.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.batch_norm.spec import (
    BatchNorm,
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    plan_forward,
    plan_gradient,
)

CHANNELS = 3
SIZES = (1, 2, 7, 64, 81, 1023, 1024, 12_800, 300_000)
"""Elements of a channel."""

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Bounds:
    """How large errors may be.

    Attributes:
        mean: Of the mean, in standard deviations.
        of_mean: On top, relative to the mean.
        variance: Of the variance, relative.
        of_mean_and_deviation: On top, of the variance, relative to the product of mean and standard deviation.
        sums: Of the sums of the gradient, relative to the sum of the magnitudes of what is added up.
        rounding: Of a sum to U, relative.
    """

    mean: float
    of_mean: float
    variance: float
    of_mean_and_deviation: float
    sums: float
    rounding: float

    @classmethod
    def of(cls, param: np.dtype[Any], num_roundings: float) -> "Bounds":
        """Returns those for U; that of float64 also depends on how often a sum is rounded."""
        if param == FLOAT32:
            return cls(2.0**-18, 2.0**-24, 1e-5, 0.0, 2.0**-18, 2.0**-24)
        moments, sums = num_roundings * 2.0**-50, num_roundings * 2.0**-53
        return cls(moments, moments, moments, moments, sums, 2.0**-53)


_RANDOM = np.random.default_rng(5).normal(0, 1, (CHANNELS, max(SIZES)))


def _noise(count: int) -> NDArray[np.float64]:
    return _RANDOM[:, :count]


def _with(place: int) -> Callable[[int], NDArray[np.float64]]:
    """Puts one number that is a million times as large as the others in a place."""

    def values(count: int) -> NDArray[np.float64]:
        array = _noise(count).copy()
        array[:, place % count] = 1e6
        return array

    return values


HARD: Mapping[str, Callable[[int], NDArray[np.float64]]] = {
    "noise": _noise,
    "all positive": lambda count: 1 + np.abs(_noise(count)),
    "outlier first": _with(0),
    "outlier second": _with(1),
    "outlier in the middle": lambda count: _with(count // 2)(count),
    "outlier last": _with(-1),
    "large first, then small": lambda count: _noise(count) * np.geomspace(1e6, 1e-6, count),
    "small first, then large": lambda count: _noise(count) * np.geomspace(1e-6, 1e6, count),
    "signs that alternate": lambda count: 1e4 * (-1.0) ** np.arange(count) + _noise(count),
    "a level that changes": lambda count: np.where(np.arange(count) < count // 3, 1000.0, -1.0) + 1e-3 * _noise(count),
    "a level that changes with the block": lambda count: 100.0 * (np.arange(count) // 1024) + _noise(count),
    "far from zero": lambda count: 1e4 + _noise(count),
    "few digits": lambda count: 2.0**20 + np.round(_noise(count)),
    "all the same": lambda count: np.full((CHANNELS, count), 0.1),
    "one that differs": lambda count: np.where(np.arange(count) == count - 1, 0.7, 0.1) * np.ones((CHANNELS, 1)),
    "tiny": lambda count: 1e-15 * _noise(count),
    "huge": lambda count: 1e15 * _noise(count),
}


def laid_out(values: NDArray[Any], data_format: str) -> NDArray[Any]:
    """Returns [channels, count] as images, in two of them where that is possible."""
    channels, count = values.shape
    images = 2 if count % 2 == 0 else 1
    stacked = values.reshape(channels, images, count // images, 1)
    order = (1, 0, 2, 3) if data_format == "NCHW" else (1, 2, 3, 0)
    return np.ascontiguousarray(stacked.transpose(order))


def assert_sums_within_bounds(
    batch_norm: BatchNorm, dtype: np.dtype[Any], data_format: str, name: str, *, is_numpy: bool = False
) -> bytes:
    """Checks the moments and the sums of the gradient, for every size; returns all results."""
    results = b""
    param = np.dtype(np.float64) if dtype == np.float64 else FLOAT32
    for count in SIZES:
        bounds = Bounds.of(param, 40 + count if is_numpy else 40 + count / 1000)
        values, exact = HARD[name](count).astype(dtype), _exact_sums(name, count, dtype, param)
        results += _assert_moments(batch_norm, values, exact, data_format, param, bounds)
        results += _assert_gradient_sums(batch_norm, values, exact, data_format, param, bounds)
    return results


@dataclass(frozen=True)
class _ExactSums:
    """What sums over the values should be, by channel, in long doubles.

    Attributes:
        mean: Of the values.
        variance: Of the values.
        rounded_mean: As the gradient gets it.
        gradient: For `offset_backprop` and `scale_backprop`: the sum, and the sum of the magnitudes of its terms.
    """

    mean: NDArray[Any]
    variance: NDArray[Any]
    rounded_mean: NDArray[Any]
    gradient: tuple[tuple[NDArray[Any], NDArray[Any]], ...]


@functools.cache  # long doubles are slow, and both layouts and both implementations are compared with them
def _exact_sums(name: str, count: int, dtype: np.dtype[Any], param: np.dtype[Any]) -> _ExactSums:
    values = HARD[name](count).astype(dtype)
    wide = values.astype(np.longdouble)
    rounded_mean = values.mean(axis=1, dtype=np.float64).astype(param)
    terms = (wide, wide * (wide - rounded_mean.astype(np.longdouble)[:, None]))
    gradient = tuple((each.sum(axis=1), np.abs(each).sum(axis=1)) for each in terms)
    return _ExactSums(wide.mean(axis=1), wide.var(axis=1), rounded_mean, gradient)


def _assert_moments(
    batch_norm: BatchNorm,
    values: NDArray[Any],
    exact: _ExactSums,
    data_format: str,
    param: np.dtype[Any],
    bounds: Bounds,
) -> bytes:
    ones, zeros = np.ones(CHANNELS, param), np.zeros(CHANNELS, param)
    inputs = ForwardInputs(laid_out(values, data_format), ones, zeros, ones[:0], ones[:0])
    attributes = ForwardAttributes(1e-3, data_format=data_format)
    outputs = batch_norm.forward(inputs, attributes, plan_forward(inputs, attributes).geometry)
    mean, variance = exact.mean, exact.variance
    deviation, magnitude = np.sqrt(variance), np.abs(mean)
    _assert_near(outputs.reserve_space_1, mean, bounds.mean * deviation + bounds.of_mean * magnitude, "mean")
    allowed = bounds.variance * variance + bounds.of_mean_and_deviation * magnitude * deviation
    _assert_near(outputs.reserve_space_2, variance, allowed, "variance")
    return b"".join(each.tobytes() for each in (outputs.y, outputs.reserve_space_1, outputs.reserve_space_2))


def _assert_gradient_sums(
    batch_norm: BatchNorm,
    values: NDArray[Any],
    exact: _ExactSums,
    data_format: str,
    param: np.dtype[Any],
    bounds: Bounds,
) -> bytes:
    """With `values` for dy and for x; epsilon is such that scale_backprop is the sum itself."""
    ones = np.ones(CHANNELS, param)
    images = laid_out(values, data_format)
    inputs = GradInputs(images, images, ones, exact.rounded_mean, ones)
    attributes = GradAttributes(0.0, data_format)
    outputs = batch_norm.gradient(inputs, attributes, plan_gradient(inputs, attributes).geometry)
    for found, (total, magnitudes) in zip(
        (outputs.offset_backprop, outputs.scale_backprop), exact.gradient, strict=True
    ):
        allowed = bounds.sums * magnitudes + bounds.rounding * np.abs(total)
        _assert_near(found, total, allowed, "sum")
    return b"".join(each.tobytes() for each in (outputs.scale_backprop, outputs.offset_backprop))


def _assert_near(found: NDArray[Any], expected: NDArray[Any], bound: NDArray[Any], what: str) -> None:
    error = np.abs(found.astype(np.longdouble) - expected)
    assert (error <= bound).all(), f"{what}: errors {error}, allowed {bound}"
