"""Four processes train a PyTorch model on handwritten digits by DiLoCo; one is slow, one is killed and started again.

From the top folder of a checkout, with a server running (`make serve`):

    pip install . scikit-learn torch
    python examples/diloco_digits.py localhost:50051

The workers synchronize every 20 steps. A round needs three of them (`num_required=3`), so nobody waits for the fourth:
updates that come too late are dropped, and the worker goes on from the newest version, as one does that is started
again. All end with equal weights.

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
SYNC_EVERY, NUM_VERSIONS = 20, 12
KILLED, KILLED_AT = 3, 4
SLOW, SLOW_SECONDS = 2, 0.02
BATCH = 32


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1797 images of 64 pixels, and what they show."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images.astype(np.float32) / 16), torch.from_numpy(labels)


def work(address: str, run: str, rank: int, report: Connection) -> None:
    """Trains as one worker; reports each version, and in the end a digest of the weights and the accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(time.time_ns())  # other batches than the others', and than before it was killed
    images, labels = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = gradserve.optim.SGD(1.0)  # the mean of the workers, as this training is short
    with (
        gradserve.connect(address, timeout=60) as client,
        gradserve.torch.DiLoCo(
            client, model, optimizer, sync_every=SYNC_EVERY, outer_optimizer=outer, name=run, num_required=NUM_REQUIRED
        ) as diloco,
    ):
        report.send(diloco.version)
        while diloco.version < NUM_VERSIONS:
            batch = torch.randint(1500, (BATCH,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            time.sleep(SLOW_SECONDS if rank == SLOW else 0)
            before = diloco.version
            optimizer.step()
            if diloco.version > before:
                report.send(diloco.version)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    report.send((diloco.version, hashlib.sha256(weights.numpy()).hexdigest()[:16], accuracy))


def start(address: str, run: str, rank: int) -> tuple[multiprocessing.Process, Connection]:
    """Starts a worker; returns its process and reports."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=work, args=(address, run, rank, theirs))
    process.start()
    return process, mine


def main(address: str) -> None:
    """Runs the workers against the server at an address, and prints what became of them."""
    run = f"digits-{uuid.uuid4()}"
    workers = [start(address, run, rank) for rank in range(NUM_WORKERS)]
    process, reports = workers[KILLED]
    while (version := reports.recv()) < KILLED_AT:
        pass
    process.kill()
    print(f"worker {KILLED}: killed at version {version}")
    workers[KILLED] = start(address, run, KILLED)
    print(f"worker {KILLED}: started again, joined at version {workers[KILLED][1].recv()}")
    for rank, (process, reports) in enumerate(workers):
        while isinstance(report := reports.recv(), int):
            pass
        version, digest, accuracy = report
        process.join()
        print(f"worker {rank}: version {version}, weights {digest}, {100 * accuracy:.1f}% of the test digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="HOST:PORT of the server")
    main(parser.parse_args().address)
