"""Workers that are killed and stopped at any moment, amid thousands of gradients of each durability."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import MutableSequence
from functools import partial
from multiprocessing.process import BaseProcess
from operator import le
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import gradserve
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.accumulators.busy_worker import LEVELS, NUM_WORKERS, accumulator, total_of, work
from tests.accumulators.forks import FORKS
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import end_process
from tests.servers.runtime import NOT_WARMED_UP

MANY = 200
"""Gradients of each level of a worker that nothing happens to."""


class Workers:
    """Processes of workers, and how many gradients of each level were acknowledged to each."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[MutableSequence[int]] = [FORKS.RawArray("i", len(LEVELS)) for _ in range(NUM_WORKERS)]
        self.is_over = FORKS.RawArray("i", 1)
        self.processes: list[BaseProcess] = [
            FORKS.Process(target=work, args=(address, rank, self.acknowledged[rank], self.is_over))
            for rank in range(NUM_WORKERS)
        ]

    def progress(self, rank: int) -> int:
        return min(list(self.acknowledged[rank]))

    def wait_for(self, rank: int, progress: int) -> None:
        eventually(lambda: self.progress(rank), partial(le, progress))

    def signal(self, rank: int, number: signal.Signals) -> None:
        process = self.processes[rank]
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, number)

    def end(self) -> None:
        self.is_over[0] = 1
        for each in self.processes:
            each.join(PATIENCE_SECONDS)
            end_process(each)


def take_all(address: str, level: str, total: NDArray[np.float64], is_over: threading.Event) -> None:
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        model = accumulator(client, level)
        while count := model.num_accumulated() if is_over.is_set() else 3:
            with contextlib.suppress(gradserve.DeadlineExceededError):  # nobody may send as many
                total += model.take_grad(count, timeout=0.5)["x"]


def test_every_acknowledged_gradient_is_in_exactly_one_average(tmp_path: Path) -> None:
    totals = {level: np.zeros((NUM_WORKERS, 3)) for level in LEVELS}
    is_over = threading.Event()
    chance = random.Random(7)
    state = StateConfig(state_dir=str(tmp_path / "state"))
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP, state=state)) as server:
        workers = Workers(server.address)
        takers = [
            threading.Thread(target=take_all, args=(server.address, level, totals[level], is_over)) for level in LEVELS
        ]
        for process in workers.processes:
            process.start()
        for taker in takers:
            taker.start()
        try:
            for rank, signals in enumerate(([signal.SIGSTOP], [signal.SIGKILL], [signal.SIGSTOP, signal.SIGKILL], [])):
                workers.wait_for(rank, chance.randrange(10, 60))
                for number in signals:
                    workers.signal(rank, number)
            workers.wait_for(3, MANY)
            workers.signal(0, signal.SIGCONT)
            workers.wait_for(0, workers.progress(0) + 20)
        finally:
            workers.signal(0, signal.SIGCONT)
            workers.end()
            is_over.set()
            for taker in takers:
                taker.join(PATIENCE_SECONDS)
    for place, level in enumerate(LEVELS):
        for rank, acknowledged in enumerate(workers.acknowledged):
            # One more may have counted when the worker was killed.
            counts = [acknowledged[place], acknowledged[place] + (rank in (1, 2))]
            expected = [total_of(rank, count)[rank].tolist() for count in counts]
            assert totals[level][rank].tolist() in expected, (level, rank)
