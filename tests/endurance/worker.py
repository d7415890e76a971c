"""A worker that averages gradients until it is killed, and writes down what it got: ADDRESS RANK FILE."""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import gradserve

NUM_WORKERS = 4
QUORUM = NUM_WORKERS - 1
"""Rounds end without the last worker, so that one that is gone does not hold up the others."""
SIZE = 10_000
COMPUTE_SECONDS = 0.02


def main() -> None:
    """Pushes gradients and pulls averages; a line for each: time, step, digest of the average."""
    address, rank, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    chance = np.random.default_rng(rank)
    with gradserve.connect(address, timeout=120, transport="grpc") as client, path.open("a", buffering=1) as log:
        model = client.gradient_accumulator({"w": np.zeros(SIZE)}, shared_name="chaos")
        step = model.info().global_step
        while True:
            time.sleep(COMPUTE_SECONDS)  # it computes a gradient
            pulled = model.push_pull(
                {"w": chance.standard_normal(SIZE)}, QUORUM, step, worker_id=f"worker-{rank}", on_stale="return"
            )
            step = pulled.step
            if "w" in pulled:
                digest = hashlib.sha256(pulled["w"].tobytes()).hexdigest()[:16]
                log.write(f"{time.time():.4f} {step} {digest}\n")


if __name__ == "__main__":
    main()
