"""Workers that share a dataset out: some leave and come back, in threads; some are killed, in processes."""

import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradserve
from gradserve.data import Sampler, sampler
from gradserve.parameter_records import RoundRecord
from gradserve.testing import ServerProcess
from gradserve.torch import LocalSGD
from tests.data.registry import Registry, begun
from tests.project.blocks.reading import read_blocks
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch import data_fleet
from tests.torch.fleets import Fleet, running
from tests.torch.training_threads import Training, together

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 50, 4, 24


def loader_of(data: Sampler, num_ahead: int) -> Iterable[Any]:
    """Returns what loads batches, if need be ahead of the steps."""
    samples: Any = TensorDataset(torch.arange(NUM_SAMPLES))

    def loaded(lists: Iterable[list[int]]) -> Iterator[Any]:
        reads = iter(lists)
        waiting = deque(samples[numbers] for numbers in islice(reads, num_ahead))
        for numbers in reads:
            waiting.append(samples[numbers])
            yield waiting.popleft()

    return data.prefetch(loaded) if num_ahead else DataLoader(samples, batch_sampler=data)


class Trained(Training):
    """A worker that notes which samples it took for which step, and who was in the rounds that it saw."""

    def __init__(self, address: str, name: str, num_ahead: int, **options: Any) -> None:
        self.data = sampler(NUM_SAMPLES, seed=3, batch_size=BATCH_SIZE)
        # One that falls behind, on a busy machine, catches up even when the others have ended.
        options = {"num_required": 2, "keep_averages": NUM_STEPS} | options
        super().__init__(address, name, data=self.data, **options)
        self.loader = loader_of(self.data, num_ahead)
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


@pytest.mark.parametrize("num_ahead", [0, 5])
def test_one_that_leaves_and_comes_back(server_address: str, name: str, num_ahead: int) -> None:
    """Rounds of two: three workers at first, the third comes back with another id and the state of the others."""
    new = partial(Trained, server_address, name, num_ahead)
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


def counts_of(records: list[RoundRecord], updates: Mapping[str, Mapping[int, list[int]]]) -> Counter[int]:
    """Returns how often each sample is in an update of a round, given the updates by worker and version."""
    members = [(update.worker_id, record.step - 1) for record in records for update in record.updates]
    return Counter(sample for worker, version in members for sample in updates[worker][version])


class Walked:
    """A worker of LocalSGD that takes two batches for each step, and notes what is in its updates."""

    def __init__(self, address: str, name: str, worker_id: str) -> None:
        self.data = sampler(NUM_SAMPLES, seed=3, batch_size=BATCH_SIZE, batches_per_step=4)
        self.loader = loader_of(self.data, 0)
        self.model = torch.nn.Linear(1, 1)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.client = gradserve.connect(address, timeout=PATIENCE_SECONDS)
        self.diloco = LocalSGD(
            self.client,
            self.model,
            self.inner,
            sync_every=2,
            name=name,
            num_required=2,
            worker_id=worker_id,
            data=self.data,
        )
        self.updates: dict[int, list[int]] = {}

    def __enter__(self) -> Self:
        self.diloco.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.diloco.__exit__(*error)
        self.client.close()

    def train(self, until: int) -> None:
        taken: list[int] = []
        while self.diloco.version < until:
            for (batch,) in self.loader:
                taken += batch.tolist()
                self.model(batch[:, None] / NUM_SAMPLES).square().mean().backward()
                if len(taken) % (2 * BATCH_SIZE) == 0:
                    version = self.diloco.version
                    self.inner.step()
                    self.inner.zero_grad()
                    if len(taken) == 4 * BATCH_SIZE:
                        self.updates[version], taken = taken, []
                    if self.diloco.version >= until:
                        break


def test_local_sgd_whose_workers_leave_and_come_back(server_address: str, name: str) -> None:
    """Rounds of two; the third worker leaves, and comes back with another id, when the first has left."""
    new = partial(Walked, server_address, name)
    first, second, third, again = (new(each) for each in ("w0", "w1", "w2", "w2 again"))
    with second:
        with first:
            together(*(partial(each.train, 6) for each in (first, second)))
        with third:
            together(*(partial(each.train, 9) for each in (third, second)))
        with again:
            together(*(partial(each.train, NUM_STEPS) for each in (again, second)))
        records = second.client.parameters(shared_name=name).rounds()
        assert again.data.state_dict() == second.data.state_dict()
    updates = {each.diloco.worker_id: each.updates for each in (first, second, third, again)}
    counts = counts_of(records, updates)
    assert counts.total() == second.data.num_counted == NUM_STEPS * 2 * 4 * BATCH_SIZE
    assert second.data.epoch == min(counts[each] for each in range(NUM_SAMPLES))


def test_local_sgd_of_a_model_on_several_ranks(client: gradserve.Client, name: str, process_group: None) -> None:
    model = torch.nn.Linear(1, 1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    data = sampler(9, seed=0, batch_size=1, batches_per_step=2)
    with pytest.raises(gradserve.InvalidArgumentError, match="no data for a model on several ranks"):
        LocalSGD(client, model, inner, sync_every=2, name=name, num_required=1, data=data)


@pytest.fixture(scope="module")
def program() -> Iterator["subprocess.Popen[str]"]:
    with running("tests.torch.data_fleet") as process:
        yield process


@pytest.mark.parametrize("restarts", [False, True])
def test_workers_that_load_ahead_and_are_killed(
    tmp_path: Path, program: "subprocess.Popen[str]", restarts: bool
) -> None:
    """Rounds of two of three or four workers: two of these are killed, and one of the two comes back under its id."""
    with ServerProcess(tmp_path, "--warm-up", "false", "--state-dir", str(tmp_path / "state")) as process:
        fleet = Fleet(program, process.address, tmp_path)
        fleet.start("a", "b", "c")
        fleet.wait_for_step(4)
        fleet.kill("c")
        fleet.start("d")
        if restarts:
            process.restart()
        fleet.wait_for_step(data_fleet.HELD_VERSION - 4)
        fleet.kill("a")
        fleet.release()
        fleet.start("c")
        results = fleet.results()
        with gradserve.connect(process.address, timeout=PATIENCE_SECONDS) as client:
            records = client.parameters(shared_name=data_fleet.RUN).rounds()
    updates = {}
    for name in "abcd":
        lines = map(json.loads, (tmp_path / f"{name}.updates").read_text().splitlines())
        updates[name] = dict(lines)
    assert all(each == results["b"] for each in results.values())
    state = results["b"]["state"]
    blocks = blocks_of(data_fleet.samples(), max(state["ahead"], default=state["first"]) + 1)
    has_counted = [blocks[at] for at in (*range(state["first"]), *state["ahead"])]
    in_rounds = [updates[update.worker_id][record.step - 1] for record in records for update in record.updates]
    assert sorted(in_rounds) == sorted(has_counted), "each block in one update, and no other"


def blocks_of(data: Sampler, number: int) -> list[list[int]]:
    """Returns the samples of the first updates of a run with one worker: those that others share out."""
    begun(data, Registry(), "alone")
    found = []
    for _ in range(number):
        batches = iter(data)
        found.append([each for _ in range(data.batches_per_step) for each in next(batches)])
        data.use()
        data.advance(["alone"])
    return found


def test_the_program_of_data_prefetch_md(tmp_path: Path) -> None:
    """In processes of its own: a DataLoader forks, and leaves processes slowly that have a server, too."""
    (block,) = (each for each in read_blocks("docs/howto/data_prefetch.md") if each.language == "python")
    with ServerProcess(tmp_path, "--warm-up", "false") as process:
        program = f"{block.text}\nprint(sampler.epoch, sampler.num_counted)"
        command = [sys.executable, "-c", program.replace("server:50051", process.address)]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            printed = [each.communicate(timeout=PATIENCE_SECONDS)[0] for each in workers]
        finally:
            for each in workers:
                each.kill()
    assert printed == [f"3 {3 * 256}\n"] * 2
