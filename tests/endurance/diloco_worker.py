"""A worker that trains by DiLoCo until it is killed, and writes down its versions: ADDRESS RANK FILE."""

import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
from gradserve import optim
from gradserve.training.diloco.plan import Plan
from gradserve.training.diloco.worker import begin_diloco

NUM_WORKERS, QUORUM = 4, 3
GRACE_SECONDS = 0.5
NAME = "storm"
SIZE = 10_000
SYNC_EVERY, STEP_SECONDS = 25, 0.02
TOKENS = 100
"""The tokens of a step."""


def main() -> None:
    """Takes steps; a line for each version: time, step, digest."""
    address, rank, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    chance = np.random.default_rng()
    with gradserve.connect(address, timeout=30, transport="grpc") as client, path.open("a", buffering=1) as log:
        worker = begin_diloco(
            client,
            [{"w": np.zeros(SIZE, np.float32)}],
            plan=Plan(SYNC_EVERY, weight="tokens"),
            name=NAME,
            num_required=QUORUM,
            outer_optimizer=optim.SGD(0.7, momentum=0.9, nesterov=True),
            to_framework=lambda array: array,
            worker_id=f"worker-{rank}",
            timeout=None,
            container="",
            if_exists="join",
            expected="alive",
            grace=GRACE_SECONDS,
            max_staleness=2,
            durability="gradient",
            keep_rounds=10_000,
        )
        values: dict[str, Any] = worker.values()

        def note() -> None:
            base = worker.fragments[0].base
            log.write(f"{time.time():.4f} {base.step} {base.digest}\n")

        def local(_names: Collection[str]) -> dict[str, Any]:
            return values

        note()
        while True:
            time.sleep(STEP_SECONDS)  # it computes
            values = {name: each + chance.standard_normal(SIZE).astype(np.float32) for name, each in values.items()}
            worker.count(TOKENS)
            changed = worker.take_step(local)
            if changed:
                values |= changed
                note()


if __name__ == "__main__":
    main()
