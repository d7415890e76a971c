"""Four processes train a PyTorch model on handwritten digits; one of them is killed, and the others go on.

From the top folder of a checkout, with a server running (`make serve`):

    pip install . scikit-learn torch
    python examples/pytorch_digits.py localhost:50051

Each step needs the gradients of three workers (`num_required=3`), so the fourth is a backup: training does not wait for
it when it is killed in the middle. The three that are left end with equal weights. With `--slow`, the fourth worker is
not killed but slow: gradients that come too late are dropped, and it takes the steps that it missed with the averages
of the others.

The lines that make workers of a script are those with `gradserve` in `work`.
"""

import argparse
import hashlib
import multiprocessing
import time
import uuid
from multiprocessing.connection import Connection

import numpy as np
import torch
from sklearn.datasets import load_digits

import gradserve.torch

NUM_WORKERS, NUM_REQUIRED = 4, 3
NUM_STEPS = 150
KILLED_AT = 50
BATCH = 32
SLOW_SECONDS = 0.05


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1797 images of 64 pixels, and what they show."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images.astype(np.float32) / 16), torch.from_numpy(labels)


def work(address: str, run: str, rank: int, seconds: float, report: Connection) -> None:
    """Trains as one worker; reports each step, and in the end a digest of the weights and the accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other batches, and other initial weights, which those of the first worker replace
    images, labels = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        gradserve.connect(address, timeout=60) as client,
        gradserve.torch.average_gradients(client, model, optimizer, num_required=NUM_REQUIRED, name=run) as averaging,
    ):
        while averaging.step < NUM_STEPS:
            batch = torch.randint(1500, (BATCH,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            time.sleep(seconds)
            optimizer.step()
            report.send(averaging.step)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    report.send((averaging.step, hashlib.sha256(weights.numpy()).hexdigest()[:16], accuracy))


def main(address: str, *, is_slow: bool) -> None:
    """Runs the workers against the server at an address, and prints what became of them."""
    run = f"digits-{uuid.uuid4()}"
    workers: list[tuple[multiprocessing.Process, Connection]] = []
    for rank in range(NUM_WORKERS):
        mine, theirs = multiprocessing.Pipe()
        seconds = SLOW_SECONDS if is_slow and rank == NUM_WORKERS - 1 else 0.0
        process = multiprocessing.Process(target=work, args=(address, run, rank, seconds, theirs))
        process.start()
        workers.append((process, mine))
    if not is_slow:
        last, reports = workers.pop()
        step = 0
        while step < KILLED_AT:
            step = reports.recv()
        last.kill()
        print(f"worker {NUM_WORKERS - 1}: killed at step {step}")
    for rank, (process, reports) in enumerate(workers):
        num_own_steps = 0
        while isinstance(report := reports.recv(), int):
            num_own_steps += 1
        step, digest, accuracy = report
        process.join()
        print(
            f"worker {rank}: step {step} after {num_own_steps} batches, weights {digest}, "
            f"{100 * accuracy:.1f}% of the test digits"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="HOST:PORT of the server")
    parser.add_argument("--slow", action="store_true", help="the fourth worker is slow, not killed")
    arguments = parser.parse_args()
    main(arguments.address, is_slow=arguments.slow)
