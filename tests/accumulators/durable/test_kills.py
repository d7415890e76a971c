"""Real servers that are killed at any moment, and started again on their directory."""

import random
import sqlite3
import threading
from contextlib import closing
from functools import partial
from itertools import chain
from operator import le
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from tests.servers.polling import PATIENCE_SECONDS, eventually


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))


NUM_WORKERS = 3
ROUNDS = 40
NEVER_STALE = 1 << 40
LEVELS = ("round", "gradient")


def durable_server(folder: Path) -> ServerProcess:
    return ServerProcess(
        folder, *("--state-dir", str(folder / "state"), "--warm-up", "false", "--log-level", "warning")
    )


def number_of(rank: int, step: int) -> float:
    """A number whose sum with others tells what is in it."""
    return float((step + 1) << (16 * rank))


def test_every_gradient_is_in_exactly_one_average(tmp_path: Path) -> None:
    averages: dict[str, list[dict[int, float]]] = {level: [{} for _ in range(NUM_WORKERS)] for level in LEVELS}
    acknowledged: list[int] = []
    kept: tuple[list[int], list[int]] = ([], [])
    total = np.zeros(2 * ROUNDS)

    def push(level: str, rank: int, address: str) -> None:
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            model = client.gradient_accumulator(
                {"x": np.zeros(1)}, shared_name=level, reduction_type="SUM", durability=level
            )
            step = 0
            while step < ROUNDS:
                number = np.array([number_of(rank, step)])
                pulled = model.push_pull({"x": number}, num_required=NUM_WORKERS, local_step=step)
                step = pulled.step
                averages[level][rank][step] = float(pulled["x"][0])

    def apply(address: str) -> None:
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            accumulator = client.conditional_accumulator(
                "float64", (3,), shared_name="applied", reduction_type="SUM", durability="gradient"
            )
            for number in range(ROUNDS):
                accumulator.apply_grad(np.full(3, 2.0**number))
                acknowledged.append(number)

    def apply_at_round(rank: int, address: str) -> None:
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            model = client.gradient_accumulator(
                {"x": np.zeros(2 * ROUNDS)}, shared_name="kept", reduction_type="SUM", durability="round"
            )
            for number in range(rank * ROUNDS, (rank + 1) * ROUNDS):
                model.apply_grad({"x": np.eye(1, 2 * ROUNDS, number)[0]}, NEVER_STALE)
                kept[rank].append(number)
            client.close(60)

    def take(address: str) -> None:
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            model = client.gradient_accumulator(
                {"x": np.zeros(2 * ROUNDS)}, shared_name="kept", reduction_type="SUM", durability="round"
            )
            num_taken = 0
            while num_taken < 2 * ROUNDS:
                average = model.take_grad(min(3, 2 * ROUNDS - num_taken))
                num_taken += average.num_gradients
                total[:] += average["x"]

    with durable_server(tmp_path) as server:
        workers = [(level, rank) for level in LEVELS for rank in range(NUM_WORKERS)]
        threads = [threading.Thread(target=push, args=(*worker, server.address)) for worker in workers]
        threads += [threading.Thread(target=apply_at_round, args=(rank, server.address)) for rank in range(2)]
        threads += [threading.Thread(target=each, args=(server.address,)) for each in (apply, take)]
        for thread in threads:
            thread.start()
        chance = random.Random(7)
        for kill in range(2):
            progress = 5 + 15 * kill + chance.randrange(10)
            # Also because a client that has not yet heard of its server does not wait for it to come back.
            eventually(lambda: min(map(len, (acknowledged, *kept, *chain(*averages.values())))), partial(le, progress))
            server.restart()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            accumulator = client.conditional_accumulator(
                "float64", (3,), shared_name="applied", reduction_type="SUM", durability="gradient"
            )
            assert accumulator.take_grad(ROUNDS).tolist() == [2.0**ROUNDS - 1] * 3
    assert total.tolist() == [1] * 2 * ROUNDS
    expected = {step + 1: sum(number_of(rank, step) for rank in range(NUM_WORKERS)) for step in range(ROUNDS)}
    assert averages == {level: [expected] * NUM_WORKERS for level in LEVELS}


def test_a_directory_that_is_damaged_is_refused(tmp_path: Path) -> None:
    with durable_server(tmp_path) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        client.conditional_accumulator("float32", (3,), shared_name="sum")
    with closing(sqlite3.connect(tmp_path / "state" / "metadata.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE accumulator SET spec = 'x'")
    with (
        pytest.raises(RuntimeError, match="the record of accumulator 'default/sum' cannot be used.*state repair"),
        server,
    ):
        pass
