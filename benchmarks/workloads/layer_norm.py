"""Inputs of the layer normalization benchmarks, and the check of results.

NumPy only: this module runs in the environment of every peer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from benchmarks.peers.driver import Setup

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

SHAPES = ((8192, 768), (512, 768), (2048, 4096), (65536, 64), (1, 1 << 22))
"""The groups of each shape, and their elements: from transformers, short groups, and a long one."""
EPSILON = 1e-5
_TOLERANCE = 1e-4


class LayerNormInputs:
    """The inputs of forward and gradient calls, as float32."""

    def __init__(self, setup: Setup) -> None:
        self.is_gradient = setup.options["op"] == "gradient"
        groups, size = setup.options["shape"]
        random = np.random.RandomState(0)
        self.x, self.y_backprop = (random.standard_normal((groups, size)).astype(np.float32) for _ in range(2))
        self.scale: Array = (random.rand(size) + 0.5).astype(np.float32)
        self.offset: Array = random.standard_normal(size).astype(np.float32)
        wide = self.x.astype(np.float64)
        self.mean: Array = wide.mean(axis=1).astype(np.float32)
        self.rstd: Array = (1 / np.sqrt(wide.var(axis=1) + EPSILON)).astype(np.float32)

    def check(self, result: Any) -> None:
        """Raises AssertionError unless `result` is y, or the gradient with respect to x."""
        rstd = self.rstd.astype(np.float64)[:, None]
        normalized = (self.x.astype(np.float64) - self.mean[:, None]) * rstd
        if self.is_gradient:
            g = self.y_backprop.astype(np.float64) * self.scale
            expected = rstd * (g - _mean(g) - normalized * _mean(g * normalized))
        else:
            expected = normalized * self.scale + self.offset
        error = np.abs(np.asarray(result, np.float64) - expected).max() / np.abs(expected).max()
        assert error < _TOLERANCE, f"wrong result: relative error {error:.2g}"


def _mean(array: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    return array.mean(axis=1, keepdims=True)
