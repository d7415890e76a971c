"""Workers in threads that share a dataset out: one of them leaves, and comes back."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, TensorDataset

from gradserve.data import sampler
from tests.torch.training_threads import Training, together

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 50, 4, 24


class Trained(Training):
    """A worker that notes which samples it took for which step, and who was in the rounds that it saw."""

    def __init__(self, address: str, name: str, **options: Any) -> None:
        self.data = sampler(NUM_SAMPLES, seed=3, batch_size=BATCH_SIZE)
        # One that falls behind, on a busy machine, catches up even when the others have ended.
        options = {"num_required": 2, "keep_averages": NUM_STEPS} | options
        super().__init__(address, name, data=self.data, **options)
        samples = TensorDataset(torch.arange(NUM_SAMPLES))
        self.loader: DataLoader[Any] = DataLoader(samples, batch_sampler=self.data)
        self.taken: dict[int, list[int]] = {}
        self.members: dict[int, list[str]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def train(self, until: int) -> None:
        while self.averaging.step < until:
            for (batch,) in self.loader:
                self.taken[self.averaging.step + 1] = batch.tolist()
                self.step()
                self.members[self.averaging.step] = self.data.state_dict()["members"]
                if self.averaging.step >= until:
                    break


def test_one_that_leaves_and_comes_back(server_address: str, name: str) -> None:
    """Rounds of two: three workers at first, the third comes back with another id and the state of the others."""
    new = partial(Trained, server_address, name)
    first, second, third = (new(seed=each, worker_id=f"w{each}") for each in range(3))
    with first, second, ThreadPoolExecutor(1) as threads:
        with third:
            together(*(partial(each.train, 6) for each in (first, second, third)))
        together(*(partial(each.train, 9) for each in (first, second)))
        goes_on = threads.submit(first.train, NUM_STEPS)  # it waits for another, and sends its state to one that comes
        with new(seed=3, worker_id="w2 again") as again:
            together(*(partial(each.train, NUM_STEPS) for each in (second, again)))
            goes_on.result()
            assert second.data.state_dict() == again.data.state_dict() == first.data.state_dict()
        workers = {"w0": first, "w1": second, "w2": third, "w2 again": again}
        counts = Counter[int]()
        for step, members in {k: v for each in workers.values() for k, v in each.members.items()}.items():
            for worker_id in members:
                counts.update(workers[worker_id].taken[step])
    assert counts.total() == first.data.num_counted == NUM_STEPS * 2 * BATCH_SIZE
    assert first.data.epoch == min(counts[each] for each in range(NUM_SAMPLES))
