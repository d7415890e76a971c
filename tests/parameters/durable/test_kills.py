"""A server with parameters on disk is killed at random instants while workers push: nothing is lost or counts twice."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import le
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve import optim
from gradserve.testing import ServerProcess
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP

NUM_WORKERS = 3
LEVELS = ("round", "gradient")
SIZE = 1000
BETWEEN_KILLS = 20
"""The mean number of rounds between two kills."""
TIMEOUT = 10 * PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))


def opened(client: gradserve.Client, level: str, *, is_durable: bool = True) -> gradserve.Parameters:
    """Finds or creates the parameters of a level."""
    return client.parameters(
        {"w": np.ones(SIZE, np.float32), "b": np.zeros(3)},
        shared_name=level,
        optimizer=optim.SGD(0.125, momentum=0.5),
        update="gradient",
        num_required=NUM_WORKERS,
        durability=level if is_durable else None,
    )


def update_of(rank: int, step: int) -> dict[str, np.ndarray]:
    """Returns whole numbers, whose weighted sums are the same in every order."""
    numbers = np.random.default_rng([rank, step]).integers(-100, 100, SIZE + 3)
    return {"w": numbers[:SIZE].astype(np.float32), "b": numbers[SIZE:].astype(np.float64)}


def weight_of(rank: int) -> float:
    return rank + 1.0


@dataclass
class Run:
    """A run of all workers at all levels.

    Attributes:
        num_rounds: The number of rounds at each level.
        is_durable: Whether the server keeps the parameters.
        digests: For each level and worker, the digests of the versions that it got, in order.
    """

    num_rounds: int
    is_durable: bool = True
    digests: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.digests = {(level, rank): [] for level in LEVELS for rank in range(NUM_WORKERS)}

    @property
    def progress(self) -> int:
        """The rounds that all workers have got at all levels."""
        return min(map(len, self.digests.values()))

    def work(self, address: str, level: str, rank: int) -> None:
        """Pushes and pulls."""
        with gradserve.connect(address, timeout=TIMEOUT) as client:
            parameters = opened(client, level, is_durable=self.is_durable)
            for step in range(self.num_rounds):
                worker_id = f"worker {rank}"
                pulled = parameters.push_pull(update_of(rank, step), step, weight=weight_of(rank), worker_id=worker_id)
                assert (pulled.outcome, pulled.version.step) == (gradserve.ACCEPTED, step + 1)
                self.digests[level, rank].append(pulled.version.digest)

    def all(self, address: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Runs all workers, each in a thread, and something else meanwhile."""
        with ThreadPoolExecutor(len(self.digests)) as threads:
            working = [threads.submit(self.work, address, *each) for each in self.digests]
            meanwhile()
            for each in working:
                each.result()


def undisturbed(num_rounds: int) -> list[str]:
    """Returns the digests of a run in which nothing happens."""
    run = Run(num_rounds, is_durable=False)
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        run.all(server.address)
    (digests,) = {tuple(each) for each in run.digests.values()}
    return list(digests)


@pytest.mark.parametrize(
    ("num_rounds", "seed"),
    [
        (50, 3),
        pytest.param(2000, 5, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
    ids=["50 rounds", "2,000 rounds"],
)
def test_no_weight_is_lost_or_counts_twice(tmp_path: Path, num_rounds: int, seed: int) -> None:
    run, chance = Run(num_rounds), random.Random(seed)
    flags = ("--state-dir", str(tmp_path / "state"), "--warm-up", "false", "--log-level", "warning")
    kills = [0]
    with ServerProcess(tmp_path, *flags) as server:

        def kill_at_random() -> None:
            progress = 0
            while (progress := progress + 1 + chance.randrange(2 * BETWEEN_KILLS)) < num_rounds:
                eventually(lambda: run.progress, partial(le, progress))
                server.restart()
                kills[0] += 1

        run.all(server.address, kill_at_random)
        assert kills[0] >= num_rounds // (4 * BETWEEN_KILLS)
        expected = undisturbed(num_rounds)
        total = num_rounds * sum(map(weight_of, range(NUM_WORKERS)))
        with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            for level in LEVELS:
                parameters = opened(client, level)
                info, records = parameters.info(), parameters.rounds()
                assert (info.step, info.digest) == (num_rounds, expected[-1])
                assert (info.weights.accepted, info.weights.applied, info.weights.pending) == (total, total, 0)
                assert [each.digest_after for each in records] == expected[-len(records) :]
                assert {len(each.updates) for each in records} == {NUM_WORKERS}
    assert run.digests == dict.fromkeys(run.digests, expected)
