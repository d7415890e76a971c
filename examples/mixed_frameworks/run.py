"""Trains one model with three workers, of which one uses PyTorch, one JAX and one NumPy.

From the top folder of a checkout, with a server running (`make serve`):

    pip install '.[jax,torch]' scikit-learn
    python examples/mixed_frameworks/run.py localhost:50051

Starts the three workers beside this file, each with a third of the digits. Then compares their weights, and their loss
with that of one process that has all digits. The workers can also be started one by one, on any machines.
"""

import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
from digits import NUM_STEPS, NUM_WORKERS, RATE, new_weights, share
from numpy_worker import loss_and_gradient

import gradserve
from gradserve.training import State, Worker

WORKERS = ("pytorch_worker.py", "jax_worker.py", "numpy_worker.py")


def trained_together(address: str, name: str) -> list[dict[str, np.ndarray]]:
    """Runs the workers; returns the weights of each."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as results:
        files = [Path(results) / f"{number}.npz" for number in range(len(WORKERS))]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    folder / worker,
                    address,
                    "--name",
                    name,
                    "--share",
                    str(number),
                    "--save",
                    files[number],
                ]
            )
            for number, worker in enumerate(WORKERS)
        ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            sys.exit("a worker has failed")
        return [dict(np.load(file)) for file in files]


def trained_alone(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Trains on all digits in this process."""
    images, labels = share(0, of=1)
    for _ in range(NUM_STEPS):
        _, gradient = loss_and_gradient(weights, images, labels)
        weights = {name: each - np.float32(RATE) * gradient[name] for name, each in weights.items()}
    return weights


def largest_difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """Returns the largest difference between two weights of the same name and place."""
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def main(address: str) -> None:
    """Trains with the server at an address, and compares."""
    name = f"mixed-digits-{uuid.uuid4()}"
    weights = new_weights()
    with gradserve.connect(address, timeout=60) as client:
        with Worker(client, weights, name=name, num_required=NUM_WORKERS) as first:
            first.begin(lambda: State({f"parameters/{each}": array for each, array in weights.items()}))
        together = trained_together(address, name)
        client.delete_accumulator(name)
    alone = trained_alone(weights)
    for worker, found in zip(WORKERS, together, strict=True):
        print(f"{worker}: differs from the first worker by {largest_difference(found, together[0]):.1e}")
    images, labels = share(0, of=1)
    losses = [loss_and_gradient(each, images, labels)[0] for each in (weights, together[0], alone)]
    print(f"loss on all digits: {losses[0]:.4f} at the start, {losses[1]:.4f} together, {losses[2]:.4f} in one process")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051")
