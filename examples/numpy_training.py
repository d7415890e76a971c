"""Fits a line with four threads that average their gradients on a gradserve server.

Needs only gradserve's client. From the top folder of a checkout, with a server running (`make serve`):

    pip install .
    python examples/numpy_training.py localhost:50051

Each thread sees a quarter of the data. Every step is one call: `push_pull` sends the thread's own
gradient, waits until all four gradients are in, and returns their average, with the step for the next call.
Threads keep the example short; the workers could also be processes or machines.
"""

import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import gradserve

NUM_WORKERS = 4
NUM_STEPS = 60
LEARNING_RATE = 0.3
TRUE_SLOPE, TRUE_INTERCEPT = np.float32(3), np.float32(-1)


def work(worker: int, accumulator: gradserve.GradientAccumulator) -> dict[str, np.ndarray]:
    """Trains on this worker's own data; returns the weights, which end up equal for all workers."""
    generator = np.random.default_rng(worker)
    x = generator.uniform(-1, 1, 100).astype(np.float32)
    y = TRUE_SLOPE * x + TRUE_INTERCEPT + generator.normal(0, 0.1, 100).astype(np.float32)

    weights = {"slope": np.zeros((), np.float32), "intercept": np.zeros((), np.float32)}
    step = accumulator.info().global_step
    for _ in range(NUM_STEPS):
        error = weights["slope"] * x + weights["intercept"] - y
        gradient = {"slope": np.mean(2 * error * x), "intercept": np.mean(2 * error)}
        average = accumulator.push_pull(
            gradient, num_required=NUM_WORKERS, local_step=step, worker_id=f"worker-{worker}"
        )
        step = average.step
        for name in weights:
            weights[name] = weights[name] - np.float32(LEARNING_RATE) * average[name]
    return weights


def main(address: str) -> None:
    """Trains against the server at an address, and prints the line that each worker found."""
    with gradserve.connect(address, timeout=60) as client:
        zeros = {"slope": np.zeros((), np.float32), "intercept": np.zeros((), np.float32)}
        accumulator = client.gradient_accumulator(zeros, shared_name=f"line-{uuid.uuid4()}")
        with ThreadPoolExecutor(NUM_WORKERS) as threads:
            results = list(threads.map(work, range(NUM_WORKERS), [accumulator] * NUM_WORKERS))
        for worker, weights in enumerate(results):
            print(f"worker-{worker}: y = {weights['slope']:.4f} * x + {weights['intercept']:.4f}")
        accumulator.delete()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} HOST:PORT")
    main(sys.argv[1])
