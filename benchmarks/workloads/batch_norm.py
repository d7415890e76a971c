"""Inputs of the batch normalisation benchmarks, and the check of results.

NumPy only: this module runs in the environment of every peer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from benchmarks.peers.driver import Setup

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

SHAPES = ((32, 56, 56, 64), (32, 14, 14, 256), (8, 112, 112, 64), (32, 28, 28, 128))
"""The batch, height, width and channels of each shape, from ResNets."""
EPSILON = 1e-3
_TOLERANCE = 1e-4


class BatchNormInputs:
    """The inputs of forward and gradient calls in training, in the format of the case, as float32."""

    def __init__(self, setup: Setup) -> None:
        self.data_format = str(setup.options["data_format"])
        self.is_gradient = setup.options["op"] == "gradient"
        random = np.random.RandomState(0)
        images = [random.standard_normal(setup.options["shape"]).astype(np.float32) for _ in range(2)]
        channels = setup.options["shape"][-1]
        if self.data_format == "NCHW":
            images = [np.ascontiguousarray(image.transpose(0, 3, 1, 2)) for image in images]
        self.x, self.y_backprop = images
        self.axis = -1 if self.data_format == "NHWC" else 1
        self._others = tuple(axis for axis in range(4) if axis != self.axis % 4)
        self.scale: Array = (random.rand(channels) + 0.5).astype(np.float32)
        self.offset: Array = random.standard_normal(channels).astype(np.float32)
        self.mean: Array = self.x.mean(axis=self._others, dtype=np.float64).astype(np.float32)
        self.variance: Array = self.x.var(axis=self._others, dtype=np.float64).astype(np.float32)

    def check(self, result: Any) -> None:
        """Raises AssertionError unless `result` is y, or the gradient with respect to x."""
        x, inverse = self._wide(self.x), 1 / np.sqrt(self._spread(self.variance) + EPSILON)
        normalized = (x - self._spread(self.mean)) * inverse
        if self.is_gradient:
            dy = self._wide(self.y_backprop)
            centered = dy - self._mean(dy) - normalized * self._mean(dy * normalized)
            expected = self._spread(self.scale) * inverse * centered
        else:
            expected = normalized * self._spread(self.scale) + self._spread(self.offset)
        error = np.abs(np.asarray(result, np.float64) - expected).max() / np.abs(expected).max()
        assert error < _TOLERANCE, f"wrong result: relative error {error:.2g}"

    def _wide(self, array: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
        return array.astype(np.float64)

    def _spread(self, per_channel: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
        shape = [1] * 4
        shape[self.axis] = -1
        return per_channel.astype(np.float64).reshape(shape)

    def _mean(self, array: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
        return array.mean(axis=self._others, keepdims=True)
