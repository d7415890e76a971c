"""Batch normalization and relu in plain NumPy, to compare with what the server computes with `--batch-norm`."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gradserve_demo.arrays import FloatArray, Weights
from gradserve_demo.hidden_layer import Backward

DECAY = 0.95
"""Decay of the moving averages: they forget a batch after about twenty updates, so a short training is enough."""

EPSILON = 0.001


class BatchNormLayer:
    """relu(gamma x' + beta), where x' is x with mean 0 and variance 1 in every worker's share of the batch.

    A worker sees only its own share and normalises by the moments of that share, and so does this class. The formulas
    are those of Ioffe and Szegedy (https://arxiv.org/abs/1502.03167). As in TensorFlow's fused implementation, the
    moving variance is updated with the sample variance (Bessel's correction).
    """

    def __init__(self, units: int, num_shares: int, dtype: npt.DTypeLike = np.float32) -> None:
        self._num_shares = num_shares
        self._mean: FloatArray = np.zeros(units, dtype)
        self._variance: FloatArray = np.ones(units, dtype)
        self._batch_mean: FloatArray = np.zeros((0, units), dtype)
        self._batch_variance: FloatArray = np.zeros((0, units), dtype)

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Normalises each share by its own moments."""
        shares = inputs.reshape(self._num_shares, -1, inputs.shape[-1])
        count = shares.shape[1]
        mean, variance = shares.mean(axis=1, keepdims=True), shares.var(axis=1, keepdims=True)
        self._batch_mean, self._batch_variance = mean[:, 0], variance[:, 0] * (count / max(count - 1, 1))
        inverse = 1 / np.sqrt(variance + EPSILON)
        normalized = (shares - mean) * inverse
        outputs = np.maximum(weights["gamma"] * normalized + weights["beta"], 0)

        def backward(d_outputs: FloatArray) -> tuple[FloatArray, Weights]:
            d_scaled = d_outputs.reshape(shares.shape) * (outputs > 0)
            along = d_scaled * normalized
            centered = d_scaled - d_scaled.mean(axis=1, keepdims=True)
            d_inputs = weights["gamma"] * inverse * (centered - normalized * along.mean(axis=1, keepdims=True))
            return d_inputs.reshape(inputs.shape), {"beta": d_scaled.sum(axis=(0, 1)), "gamma": along.sum(axis=(0, 1))}

        return outputs.reshape(inputs.shape), backward

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Normalises by the moving averages, which are among the weights."""
        normalized = (inputs - weights["moving_mean"]) / np.sqrt(weights["moving_variance"] + EPSILON)
        outputs: FloatArray = np.maximum(weights["gamma"] * normalized + weights["beta"], 0)
        return outputs

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Moves the averages by each share of the last inputs, one after the other."""
        for mean, variance in zip(self._batch_mean, self._batch_variance, strict=True):
            self._mean = self._mean - (self._mean - mean) * (1 - DECAY)
            self._variance = self._variance - (self._variance - variance) * (1 - DECAY)

    def state(self) -> Weights:
        """Returns the moving averages."""
        return {"moving_mean": self._mean, "moving_variance": self._variance}
