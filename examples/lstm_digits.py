"""Trains an LSTM to read handwritten digits, row by row; a gradserve server computes its gradients.

Needs gradserve's client, and scikit-learn for the digits. From the top folder of a checkout, with a server running
(`make serve`):

    pip install . scikit-learn
    python examples/lstm_digits.py localhost:50051

The server computes the LSTM, forward and backward; the softmax on top and Adam are in this program.
"""

import argparse
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import gradserve

ROWS, COLUMNS, CLASSES, UNITS, BATCH = 8, 8, 10, 64, 64


class Adam:
    """The Adam optimizer (Kingma and Ba, 2014)."""

    def __init__(self, rate: float) -> None:
        self.rate, self.step = rate, 0
        self.moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def update(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        """Takes a step against the gradients."""
        self.step += 1
        for name, gradient in gradients.items():
            mean, square = self.moments.setdefault(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            corrected = mean / (1 - 0.9**self.step), square / (1 - 0.999**self.step)
            weights[name] -= self.rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)


def lstm(client: gradserve.Client, images: np.ndarray, params: np.ndarray, *, is_training: bool) -> dict[str, Any]:
    """Returns all inputs and outputs of the forward call."""
    sequences = np.ascontiguousarray(images.transpose(1, 0, 2))  # time first: each step is one row of every image
    start = np.zeros((1, len(images), UNITS), np.float32)
    inputs: dict[str, Any] = {"input": sequences, "input_h": start, "input_c": start, "params": params}
    outputs = client.raw_ops.CudnnRNNV3(**inputs, is_training=is_training)
    return {**inputs, **outputs._asdict()}


def probabilities(hidden: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the softmax over the digits, shape [batch, 10]."""
    logits = hidden @ weights["w"] + weights["b"]
    odds: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: np.ndarray = odds / odds.sum(axis=1, keepdims=True)
    return result


def main() -> None:
    """Trains, and prints after each epoch how many of the test digits are read correctly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", default="localhost:50051")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, ROWS, COLUMNS)
    random = np.random.RandomState(0)
    order = random.permutation(len(images))
    test, train = order[:360], order[360:]

    with gradserve.connect(arguments.address) as client:
        (num_params,) = client.raw_ops.CudnnRNNParamsSize(num_layers=1, num_units=UNITS, input_size=COLUMNS)
        weights = {
            "lstm": random.uniform(-0.1, 0.1, num_params).astype(np.float32),
            "w": random.uniform(-0.1, 0.1, (UNITS, CLASSES)).astype(np.float32),
            "b": np.zeros(CLASSES, np.float32),
        }
        adam = Adam(rate=0.01)
        for epoch in range(arguments.epochs):
            for start in range(0, len(train), BATCH):
                chosen = train[start : start + BATCH]
                forward = lstm(client, images[chosen], weights["lstm"], is_training=True)
                hidden = forward["output"][-1]
                error = (probabilities(hidden, weights) - np.eye(CLASSES)[labels[chosen]]) / len(chosen)
                output_backprop = np.zeros_like(forward["output"])
                output_backprop[-1] = error @ weights["w"].T
                nothing = np.zeros_like(forward["output_h"])
                backward = client.raw_ops.CudnnRNNBackpropV3(
                    **forward,
                    output_backprop=output_backprop,
                    output_h_backprop=nothing,
                    output_c_backprop=nothing,
                )
                adam.update(weights, {"lstm": backward.params_backprop, "w": hidden.T @ error, "b": error.sum(axis=0)})
            read = lstm(client, images[test], weights["lstm"], is_training=False)["output"][-1]
            accuracy = np.mean(probabilities(read, weights).argmax(axis=1) == labels[test])
            print(f"epoch {epoch + 1}: {accuracy:.1%} of the test digits are read correctly")


if __name__ == "__main__":
    main()
