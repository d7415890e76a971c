"""Trains with NumPy: `gradserve.training` is the part that the workers for PyTorch and JAX stand on, too."""

from collections.abc import Mapping

import numpy as np
from digits import NUM_STEPS, NUM_WORKERS, RATE, Task, new_weights, share

import gradserve
from gradserve.training import State, Worker


def loss_and_gradient(
    weights: Mapping[str, np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the mean cross entropy, and its gradient by the names of the weights."""
    hidden = np.tanh(images @ weights["0.weight"].T + weights["0.bias"])
    logits = hidden @ weights["2.weight"].T + weights["2.bias"]
    logits -= logits.max(axis=1, keepdims=True)
    log_odds = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    error = np.exp(log_odds)
    error[rows, labels] -= 1
    error /= len(labels)
    hidden_error = error @ weights["2.weight"] * (1 - hidden**2)
    return -float(log_odds[rows, labels].mean()), {
        "0.weight": hidden_error.T @ images,
        "0.bias": hidden_error.sum(axis=0),
        "2.weight": error.T @ hidden,
        "2.bias": error.sum(axis=0),
    }


def train(task: Task) -> dict[str, np.ndarray]:
    """Trains together with the other workers."""
    images, labels = share(task.share)
    weights = new_weights()

    def state() -> State:
        return State({f"parameters/{name}": each for name, each in weights.items()})

    with (
        gradserve.connect(task.address, timeout=60) as client,
        Worker(client, weights, name=task.name, num_required=NUM_WORKERS) as worker,
    ):
        received = worker.begin(state)
        while worker.step < NUM_STEPS:
            if received is not None:
                weights = {name: np.array(received.tensors[f"parameters/{name}"]) for name in weights}
            loss, gradient = loss_and_gradient(weights, images, labels)
            advance = worker.exchange(gradient)
            received = advance.state
            for average in advance.averages:
                weights = {name: each - np.float32(RATE) * average[name] for name, each in weights.items()}
    print(f"NumPy: loss {loss:.4f} on its own digits")
    return weights


if __name__ == "__main__":
    told = Task.from_command_line()
    told.save_weights(train(told))
