"""Workers of LocalSGD that share a dataset out and load it ahead, in processes; run as a program, like `elastic_fleet`.

Each appends its updates to FOLDER/NAME.updates before it pushes them: the version from which it began, and the samples.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gradserve
from gradserve.data import Sampler, sampler
from gradserve.torch import LocalSGD
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.elastic_fleet import main

NUM_VERSIONS, HELD_VERSION = 24, 14
NUM_SAMPLES, BATCH_SIZE, SYNC_EVERY = 50, 3, 2
RUN = "net"


def samples() -> Sampler:
    return sampler(NUM_SAMPLES, seed=1, batch_size=BATCH_SIZE, batches_per_step=SYNC_EVERY)


def be_silent(_number: int) -> None:
    """Drops what a loading process says: its worker may be killed while it gets a batch, and raises its errors."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def work(address: str, folder: Path, name: str) -> None:
    """Trains to NUM_VERSIONS, in rounds of two workers."""
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.arange(NUM_SAMPLES))
    data = samples()

    def load(numbers: Iterable[list[int]]) -> DataLoader[Any]:
        return DataLoader(dataset, batch_sampler=numbers, num_workers=2, prefetch_factor=3, worker_init_fn=be_silent)

    loader = data.prefetch(load)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        gradserve.connect(address, timeout=PATIENCE_SECONDS) as client,
        (folder / f"{name}.updates").open("a", buffering=1) as updates,
        LocalSGD(
            client, model, inner, sync_every=SYNC_EVERY, name=RUN, num_required=2, worker_id=name, data=data
        ) as run,
    ):
        taken: list[int] = []
        while run.version < NUM_VERSIONS:
            for (batch,) in loader:
                while run.version >= HELD_VERSION and not (folder / "go").exists():
                    time.sleep(0.01)
                taken += batch.tolist()
                if len(taken) == SYNC_EVERY * BATCH_SIZE:
                    updates.write(f"{json.dumps([run.version, taken])}\n")
                    taken = []
                inner.zero_grad()
                model(batch[:, None] / NUM_SAMPLES).square().mean().backward()
                inner.step()
                (folder / f"{name}.step").write_text(str(run.version))
                if run.version >= NUM_VERSIONS:
                    break
        result = {"step": run.version, "state": data.state_dict()}
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(work)
