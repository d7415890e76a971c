"""A small neural network: one hidden layer, softmax cross-entropy.

Functions on a dict of arrays, in NumPy except for the hidden layer, which the server may compute.
Every result has the element type of the weights: the demo trains in float32, and a test checks the
gradients in float64.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from gradserve_demo.arrays import FloatArray, IntArray, Weights
from gradserve_demo.hidden_layer import HiddenLayer, TanhLayer

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
