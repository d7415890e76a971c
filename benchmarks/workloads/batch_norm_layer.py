"""Inputs of the benchmarks of the batch normalization layer, and the check of results.

NumPy only: this module runs in the environment of every peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from benchmarks.peers.driver import Setup

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SHAPES = ((64, 28, 28, 64), (32, 56, 56, 64), (128, 512))
"""Images of ResNets, channels last, and the rows of a dense layer."""
DECAY, EPSILON = 0.999, 1e-3
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class StepResult:
    """The results of a training step, each one an array or convertible to one by NumPy."""

    outputs: Any
    inputs_gradient: Any
    beta_gradient: Any
    gamma_gradient: Any
    moving_mean: Any
    """The value after the step, as is the moving variance."""
    moving_variance: Any


class LayerInputs:
    """The inputs of a training step of the layer, as float32."""

    def __init__(self, setup: Setup) -> None:
        shape = tuple(setup.options["shape"])
        self.activation = str(setup.options["activation"])
        random = np.random.RandomState(0)
        self.x, self.dy = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
        self.beta: Array = random.standard_normal(shape[-1]).astype(np.float32)
        self.gamma: Array = (random.rand(shape[-1]) + 0.5).astype(np.float32)

    def check(self, result: StepResult, num_steps: int, *, is_fused: bool = True) -> None:
        """Raises AssertionError unless `result` is from the last of some steps that started with averages of 0 and 1.

        A fused layer updates the moving variance with the sample variance, another one with the population variance.
        """
        x, dy = self.x.astype(np.float64), self.dy.astype(np.float64)
        others = tuple(range(x.ndim - 1))
        count = x.size // x.shape[-1]
        mean, variance = x.mean(axis=others), x.var(axis=others)
        scale = self.gamma / np.sqrt(variance + EPSILON)
        normalized = (x - mean) / np.sqrt(variance + EPSILON)
        y = normalized * self.gamma + self.beta
        if self.activation == "relu":
            # For the smallest values, rounding decides which side of the corner they are on.
            dy = np.where(np.abs(y) < _TOLERANCE, dy * (np.asarray(result.outputs) > 0), dy * (y > 0))
            y = np.maximum(y, 0)
        beta_gradient, gamma_gradient = dy.sum(axis=others), (dy * normalized).sum(axis=others)
        kept, fed = DECAY**num_steps, variance * (count / (count - 1) if is_fused else 1)
        _check("outputs", result.outputs, y)
        _check(
            "inputs_gradient",
            result.inputs_gradient,
            scale * (dy - (beta_gradient + normalized * gamma_gradient) / count),
        )
        _check("beta_gradient", result.beta_gradient, beta_gradient)
        _check("gamma_gradient", result.gamma_gradient, gamma_gradient)
        _check("moving_mean", result.moving_mean, mean * (1 - kept))
        _check("moving_variance", result.moving_variance, kept + fed * (1 - kept))


def _check(name: str, found: Any, expected: Array) -> None:
    error = np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()
    assert error < _TOLERANCE, f"wrong {name}: relative error {error:.2g}"
