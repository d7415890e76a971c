"""Moments with weights, and their gradients, over the range of float32."""

import numpy as np
import pytest

from gradserve_server.layers.batch_norm.passes import MomentsGradient, WeightedBatch
from gradserve_server.ops.batch_norm.spec import Geometry


@pytest.mark.parametrize(("deviation", "of_g"), [(1.0, 1.0), (1e16, 1e-14), (1e18, 1e-10), (1e-16, 1e-15)])
def test_the_inputs_gradient_keeps_its_digits(deviation: float, of_g: float) -> None:
    random = np.random.default_rng(3)
    x = (random.normal(0, deviation, (6, 4, 3, 1))).astype(np.float32)
    g = random.normal(0, of_g, x.shape) + x / deviation * of_g
    weights = random.uniform(0.5, 2, 6)
    batch = WeightedBatch.of(x, weights, Geometry(outer=24, channels=3, inner=1))
    wide, each = x.astype(np.float64), weights[:, None, None, None]
    mean = ((each * wide).sum(axis=(0, 1, 3)) / (4 * weights.sum())).astype(np.float32)
    centered = wide - mean[:, None]
    inverse = 1 / np.sqrt((each * centered**2).sum(axis=(0, 1, 3)) / (4 * weights.sum()))
    xhat = centered * inverse[:, None]
    totals, dots = g.sum(axis=(0, 1, 3)), (g * xhat).sum(axis=(0, 1, 3))
    found = batch.inputs_gradient(np, MomentsGradient(mean, inverse, totals, dots))
    expected = -each / (4 * weights.sum()) * inverse[:, None] * (totals[:, None] + xhat * dots[:, None])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.astype(np.float64), expected, 0, 1e-6 * np.abs(expected).max())
