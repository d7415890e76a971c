"""Trains a small network to read handwritten digits, with batch normalization computed by a gradserve server.

Needs gradserve's client, and scikit-learn for the digits. From the top folder of a checkout, with a server running
(`make serve`):

    pip install . scikit-learn
    python examples/batch_norm_layer.py localhost:50051

The layer is tf.contrib.layers.batch_norm: its variables live on the server. The two matrices, the softmax and gradient
descent are in this program.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import gradserve

PIXELS, UNITS, CLASSES, BATCH = 64, 32, 10, 64
LEARNING_RATE = np.float32(0.5)


def probabilities(hidden: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Returns the softmax over the digits, shape [batch, 10]."""
    logits = hidden @ output
    odds: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: np.ndarray = odds / odds.sum(axis=1, keepdims=True)
    return result


def main() -> None:
    """Trains, and prints after each epoch how many of the test digits are read correctly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", default="localhost:50051")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    random = np.random.default_rng(0)
    order = random.permutation(len(images))
    test, train = order[:360], order[360:]
    matrices = {
        "hidden": random.normal(0, PIXELS**-0.5, (PIXELS, UNITS)).astype(np.float32),
        "output": random.normal(0, UNITS**-0.5, (UNITS, CLASSES)).astype(np.float32),
    }

    with (
        gradserve.connect(arguments.address) as client,
        # Without a scope, the layer is private to this client and ends with it.
        client.batch_norm(decay=0.9, scale=True, activation_fn="relu") as batch_norm,
    ):
        for epoch in range(arguments.epochs):
            for start in range(0, len(train), BATCH):
                chosen = train[start : start + BATCH]
                hidden = batch_norm(images[chosen] @ matrices["hidden"])
                truth = np.eye(CLASSES, dtype=np.float32)[labels[chosen]]
                error = (probabilities(hidden, matrices["output"]) - truth) / len(chosen)
                gradients = batch_norm.backward(error @ matrices["output"].T)
                batch_norm.run_updates()  # of the moving averages, which the test below uses

                matrices["output"] -= LEARNING_RATE * (hidden.T @ error)
                matrices["hidden"] -= LEARNING_RATE * (images[chosen].T @ gradients.inputs)
                variables = batch_norm.variables
                batch_norm.set_variables(
                    {name: variables[name] - LEARNING_RATE * getattr(gradients, name) for name in ("beta", "gamma")}
                )
            hidden = batch_norm(images[test] @ matrices["hidden"], is_training=False)
            accuracy = np.mean(probabilities(hidden, matrices["output"]).argmax(axis=1) == labels[test])
            print(f"epoch {epoch + 1}: {accuracy:.1%} of the test digits are read correctly")


if __name__ == "__main__":
    main()
