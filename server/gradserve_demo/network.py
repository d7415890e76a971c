"""A small neural network: one hidden layer, softmax cross-entropy.

Functions on a dict of arrays, in NumPy except for the hidden layer: that one is tanh, batch normalization in NumPy, or
batch normalization by the server (`served.ServedBatchNormLayer`), with which the one in NumPy is compared.
Every result has the element type of the weights: the demo trains in float32, and a test checks the
gradients in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
Weights: TypeAlias = dict[str, FloatArray]
Backward: TypeAlias = Callable[[FloatArray], tuple[FloatArray, Weights]]
"""Takes the gradient of the outputs; returns the gradients of the inputs and of each of the layer's weights."""


class HiddenLayer(Protocol):
    """A layer from [batch, units] to [batch, units], whose weights are among the network's."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs in training, and the function that computes their gradients."""
        ...

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Returns the outputs outside training; the weights include the layer's `state`."""
        ...

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Takes the new weights, once the gradients of all workers have been applied."""
        ...

    def state(self) -> Weights:
        """Returns what the layer has learnt in addition to the weights."""
        ...


class TanhLayer:
    """A bias and tanh, without state."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs and the function that computes their gradients."""
        outputs = self.infer(weights, inputs)

        def backward(d_outputs: FloatArray) -> tuple[FloatArray, Weights]:
            d_inputs = d_outputs * (1 - outputs * outputs)
            return d_inputs, {"hidden_bias": d_inputs.sum(axis=0)}

        return outputs, backward

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Returns the same as in training."""
        outputs: FloatArray = np.tanh(inputs + weights["hidden_bias"])
        return outputs

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Does nothing."""

    def state(self) -> Weights:
        """Returns an empty dict: there is no state."""
        return {}


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


TANH: Final = TanhLayer()


def initial_weights(
    inputs: int,
    hidden: int,
    classes: int,
    seed: int,
    dtype: npt.DTypeLike = np.float32,
    *,
    batch_norm: bool = False,
) -> Weights:
    """Returns random weights; the same seed gives the same weights.

    Args:
        inputs: Pixels of an image.
        hidden: Units of the hidden layer.
        classes: Number of digits to distinguish.
        seed: Decides the random numbers.
        dtype: Element type of the weights.
        batch_norm: Whether the hidden layer is batch normalization, whose beta is then the bias.
    """
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> FloatArray:
        # Glorot's uniform initialisation keeps tanh in its linear range at the start.
        limit = np.sqrt(6 / (rows + columns))
        return generator.uniform(-limit, limit, (rows, columns)).astype(dtype)

    zeros = np.zeros(hidden, dtype)
    hidden_weights = {"beta": zeros, "gamma": np.ones(hidden, dtype)} if batch_norm else {"hidden_bias": zeros}
    return {
        "hidden_weight": matrix(inputs, hidden),
        **hidden_weights,
        "output_weight": matrix(hidden, classes),
        "output_bias": np.zeros(classes, dtype),
    }


def loss_and_gradients(
    weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray, layer: HiddenLayer = TANH
) -> tuple[float, Weights]:
    """Returns the mean loss over a batch and its gradient with respect to every weight.

    Both are means over the batch, so the mean over several batches of equal size equals the mean
    over the joint batch. That makes the workers' average equal to the one-process gradient.
    """
    activations, backward = layer.forward(weights, images @ weights["hidden_weight"])
    log_probabilities = _log_probabilities(weights, activations)
    rows = np.arange(len(labels))
    loss = -float(log_probabilities[rows, labels].mean(dtype=np.float64))

    d_logits = np.exp(log_probabilities)
    d_logits[rows, labels] -= 1
    d_logits /= len(labels)
    d_hidden, layer_gradients = backward(d_logits @ weights["output_weight"].T)
    gradients: Weights = {
        "hidden_weight": images.T @ d_hidden,
        **layer_gradients,
        "output_weight": activations.T @ d_logits,
        "output_bias": d_logits.sum(axis=0),
    }
    return loss, gradients


def mean_loss(
    weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray, layer: HiddenLayer = TANH
) -> float:
    """Returns the mean loss over a set of images, outside training."""
    log_probabilities = _inferred(weights, images, layer)
    return -float(log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64))


def accuracy(
    weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray, layer: HiddenLayer = TANH
) -> float:
    """Returns the share of images whose most probable class is their label, outside training."""
    return float(np.mean(_inferred(weights, images, layer).argmax(axis=1) == labels))


def descend(weights: Mapping[str, FloatArray], gradients: Mapping[str, FloatArray], learning_rate: float) -> Weights:
    """Returns the weights after one step of plain gradient descent."""
    return {name: value - value.dtype.type(learning_rate) * gradients[name] for name, value in weights.items()}


def max_difference(left: Mapping[str, FloatArray], right: Mapping[str, FloatArray]) -> float:
    """Returns the largest absolute difference between two sets of weights."""
    return max(float(np.max(np.abs(left[name] - right[name]))) for name in left)


def _inferred(weights: Mapping[str, FloatArray], images: FloatArray, layer: HiddenLayer) -> FloatArray:
    return _log_probabilities(weights, layer.infer(weights, images @ weights["hidden_weight"]))


def _log_probabilities(weights: Mapping[str, FloatArray], activations: FloatArray) -> FloatArray:
    """Returns the log probabilities of the classes, given the outputs of the hidden layer."""
    logits = activations @ weights["output_weight"] + weights["output_bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probabilities
