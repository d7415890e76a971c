"""The bounds of docs/layer_norm.md for the sums of LayerNorm on the host.

Nothing here is pytest's: processes that compute for another processor check the same.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.layer_norm.spec import ForwardAttributes, ForwardInputs, Geometry, GradInputs, LayerNorm
from tests.ops.batch_norm.accuracy import HARD
from tests.ops.layer_norm.random_calls import raw_bytes

SIZES = (1, 2, 7, 64, 81, 1023, 1025, 12_800)
"""How many numbers are added up."""

MEAN = 2.0**-18
"""In standard deviations."""

RSTD = 5e-6
"""Relative."""

SUMS = 2.0**-18
"""Of the gradients of scale and offset, relative to the sum of the magnitudes of what is added up."""

ROUNDING = 2.0**-24
"""Of a result to float32, relative."""

NAMES = tuple(HARD)


def assert_sums_within_bounds(layer_norm: LayerNorm, name: str) -> bytes:
    """Checks the sums of both ops, in float32, for every size; returns all results."""
    results = b""
    for count in SIZES:
        values = HARD[name](count).astype(np.float32)
        results += _assert_moments(layer_norm, values)
        results += _assert_gradient_sums(layer_norm, np.ascontiguousarray(values.T))
    return results


def _assert_moments(layer_norm: LayerNorm, values: NDArray[np.float32]) -> bytes:
    """Each row is a group; epsilon is a millionth of the least variance, unless that is 0."""
    groups, size = values.shape
    wide = values.astype(np.longdouble)
    mean, variance = wide.mean(axis=1), wide.var(axis=1)
    epsilon = float(variance.min()) * 1e-6 or 1e-30
    ones = np.ones(size, np.float32)
    outputs = layer_norm.forward(
        ForwardInputs(values, ones, ones), ForwardAttributes(epsilon), Geometry((groups,), size)
    )
    rstd = 1 / np.sqrt(variance + np.longdouble(epsilon))
    _assert_near(outputs.mean, mean, MEAN * np.sqrt(variance) + ROUNDING * np.abs(mean), "mean")
    _assert_near(outputs.rstd, rstd, (RSTD + ROUNDING) * rstd, "rstd")
    return raw_bytes(outputs)


def _assert_gradient_sums(layer_norm: LayerNorm, values: NDArray[np.float32]) -> bytes:
    """Each column is added up, with `values` for dy and for x; a mean of 0 and an rstd of 1 make x the factor."""
    groups, size = values.shape
    zeros, ones = np.zeros(groups, np.float32), np.ones(groups, np.float32)
    inputs = GradInputs(values, values, np.ones(size, np.float32), zeros, ones)
    outputs = layer_norm.gradient(inputs, Geometry((groups,), size))
    dy = values.astype(np.longdouble)
    for found, terms in ((outputs.offset_backprop, dy), (outputs.scale_backprop, dy * dy)):
        total = terms.sum(axis=0)
        _assert_near(found, total, SUMS * np.abs(terms).sum(axis=0) + ROUNDING * np.abs(total), "sum")
    return raw_bytes(outputs)


def _assert_near(found: NDArray[Any], expected: NDArray[Any], bound: NDArray[Any], what: str) -> None:
    error = np.abs(found.astype(np.longdouble) - expected)
    assert (error <= bound).all(), f"{what}: errors {error}, allowed {bound}"
