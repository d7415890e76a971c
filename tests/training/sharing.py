"""Workers of DiLoCo that share a dataset out.

A worker takes the batches of an update, and pushes it later, so that tests can let things happen in between.
"""

from collections import Counter
from typing import Any

import numpy as np

import gradserve
from gradserve import optim
from gradserve.data import Batches, Sampler, sampler
from gradserve.training.diloco.plan import Plan
from gradserve.training.diloco.worker import begin_diloco

NUM_SAMPLES, BATCH_SIZE, SYNC_EVERY = 11, 2, 2
_MOST_ALONE = 200


def samples() -> Sampler:
    return sampler(NUM_SAMPLES, seed=5, batch_size=BATCH_SIZE, batches_per_step=SYNC_EVERY)


class Trained:
    """A worker, and the samples of its updates by the step of the version that they were computed from."""

    def __init__(
        self, client: gradserve.Client, name: str, worker_id: str, data: Batches[Any] | None = None, **options: Any
    ) -> None:
        self.data = samples() if data is None else data
        self.worker = begin_diloco(
            client,
            [{"w": np.zeros(1)}],
            plan=Plan(SYNC_EVERY, data=self.data),
            name=name,
            worker_id=worker_id,
            outer_optimizer=optim.SGD(1.0),
            to_framework=np.asarray,
            **{"num_required": 1, "timeout": None, "container": "", "if_exists": "join"} | options,
        )
        self.values = self.worker.values()
        """Each step adds 1."""
        self.updates: dict[int, list[int]] = {}

    def take(self) -> None:
        batches = iter(self.data)
        taken = [each for _ in range(SYNC_EVERY) for each in next(batches, None) or next(iter(self.data))]
        assert self.updates.setdefault(self.worker.version, taken) == taken, "the same ones for the same version"

    def push(self) -> None:
        for _ in range(SYNC_EVERY):
            self.values = {name: each + 1 for name, each in self.values.items()}
            self.values |= self.worker.take_step(lambda _: self.values)
        assert self.data.step == self.worker.version

    def train(self) -> None:
        self.take()
        self.push()


def assert_once(client: gradserve.Client, name: str, keepers: list[Trained], *others: Trained) -> None:
    """Lets workers take what others have left, and compares all counts with the records of the rounds."""
    for _ in range(_MOST_ALONE):
        if not keepers[-1].data.state_dict()["ahead"]:
            break
        for each in keepers:
            each.train()
    state, epoch = keepers[-1].data.state_dict(), keepers[-1].data.epoch
    counts = Counter[int](dict.fromkeys(range(NUM_SAMPLES), 0))
    updates: dict[tuple[str, int], list[int]] = {}
    for worker in (*keepers, *others):
        updates |= {(worker.worker.worker_id, step): taken for step, taken in worker.updates.items()}
    for record in client.parameters(shared_name=name).rounds():
        for update in record.updates:
            counts.update(updates[update.worker_id, record.step - 1])
    version = client.parameters(shared_name=name).read()
    assert version["w"].tolist() == [SYNC_EVERY * version.step], "each update has the steps of its own batches alone"
    assert not state["ahead"]
    assert counts.total() == keepers[-1].data.num_counted
    assert {count - epoch for count in counts.values()} <= {0, 1}
