"""A small neural network in NumPy: one hidden layer, softmax cross-entropy.

Pure functions over a dict of arrays. Every result has the element type of the weights: the demo
trains in float32, and a test checks the gradients in float64.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
Weights: TypeAlias = dict[str, FloatArray]


def initial_weights(inputs: int, hidden: int, classes: int, seed: int, dtype: npt.DTypeLike = np.float32) -> Weights:
    """Returns random weights, the same for the same seed."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> FloatArray:
        # Glorot's uniform initialisation keeps tanh in its linear range at the start.
        limit = np.sqrt(6 / (rows + columns))
        return generator.uniform(-limit, limit, (rows, columns)).astype(dtype)

    return {
        "hidden_weight": matrix(inputs, hidden),
        "hidden_bias": np.zeros(hidden, dtype),
        "output_weight": matrix(hidden, classes),
        "output_bias": np.zeros(classes, dtype),
    }


def loss_and_gradients(
    weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray
) -> tuple[float, Weights]:
    """Returns the mean loss over a batch and its gradient by every weight.

    Both are means over the batch, so the mean over several batches of equal size is that of the
    joint batch. That is what makes the workers' average equal to the one-process gradient.
    """
    activations, log_probabilities = _forward(weights, images)
    rows = np.arange(len(labels))
    loss = -float(log_probabilities[rows, labels].mean(dtype=np.float64))

    d_logits = np.exp(log_probabilities)
    d_logits[rows, labels] -= 1
    d_logits /= len(labels)
    d_hidden = (d_logits @ weights["output_weight"].T) * (1 - activations * activations)
    gradients: Weights = {
        "hidden_weight": images.T @ d_hidden,
        "hidden_bias": d_hidden.sum(axis=0),
        "output_weight": activations.T @ d_logits,
        "output_bias": d_logits.sum(axis=0),
    }
    return loss, gradients


def mean_loss(weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray) -> float:
    """Returns the mean loss over a set of images."""
    _, log_probabilities = _forward(weights, images)
    return -float(log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64))


def accuracy(weights: Mapping[str, FloatArray], images: FloatArray, labels: IntArray) -> float:
    """Returns the share of images whose most probable class is their label."""
    _, log_probabilities = _forward(weights, images)
    return float(np.mean(log_probabilities.argmax(axis=1) == labels))


def descend(weights: Mapping[str, FloatArray], gradients: Mapping[str, FloatArray], learning_rate: float) -> Weights:
    """Returns the weights after one step of plain gradient descent."""
    return {name: value - value.dtype.type(learning_rate) * gradients[name] for name, value in weights.items()}


def max_difference(left: Mapping[str, FloatArray], right: Mapping[str, FloatArray]) -> float:
    """Returns the largest absolute difference between two sets of weights."""
    return max(float(np.max(np.abs(left[name] - right[name]))) for name in left)


def _forward(weights: Mapping[str, FloatArray], images: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the activations of the hidden layer and the log-probabilities of the classes."""
    activations = np.tanh(images @ weights["hidden_weight"] + weights["hidden_bias"])
    logits = activations @ weights["output_weight"] + weights["output_bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    return activations, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
