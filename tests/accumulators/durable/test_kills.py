"""Real servers that are killed at any moment, and started again on their directory."""

import random
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gradserve
from tests.servers.process import ServerProcess


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", "60")


NUM_WORKERS = 3
ROUNDS = 20


def durable_server(folder: Path, durability: str) -> ServerProcess:
    return ServerProcess(
        folder,
        *("--state-dir", str(folder / "state"), "--durability", durability),
        *("--warm-up", "false", "--log-level", "warning"),
    )


def number_of(rank: int, step: int) -> float:
    """A number whose sum with others tells what is in it."""
    return float((step + 1) << (16 * rank))


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_every_gradient_is_in_exactly_one_average(tmp_path: Path, durability: str) -> None:
    averages: list[dict[int, float]] = [{} for _ in range(NUM_WORKERS)]

    def work(rank: int, address: str) -> None:
        with gradserve.connect(address, timeout=60) as client:
            model = client.gradient_accumulator({"x": np.zeros(1)}, shared_name="sum", reduction_type="SUM")
            step = 0
            while step < ROUNDS:
                number = np.array([number_of(rank, step)])
                pulled = model.push_pull({"x": number}, num_required=NUM_WORKERS, local_step=step)
                step = pulled.step
                averages[rank][step] = float(pulled["x"][0])

    with durable_server(tmp_path, durability) as server:
        threads = [threading.Thread(target=work, args=(rank, server.address)) for rank in range(NUM_WORKERS)]
        for thread in threads:
            thread.start()
        chance = random.Random(7)
        for _ in range(2):
            time.sleep(chance.uniform(0.0, 0.3))
            server.replace()
        for thread in threads:
            thread.join(60)
    expected = {step + 1: sum(number_of(rank, step) for rank in range(NUM_WORKERS)) for step in range(ROUNDS)}
    assert averages == [expected] * NUM_WORKERS


def test_gradients_that_were_acknowledged_are_in_the_next_average(tmp_path: Path) -> None:
    with durable_server(tmp_path, "gradient") as server, gradserve.connect(server.address, timeout=60) as client:
        accumulator = client.conditional_accumulator("float64", (3,), shared_name="sum", reduction_type="SUM")
        for number in range(9):
            accumulator.apply_grad(np.full(3, 2.0**number))
            if number % 4 == 3:
                server.replace()
        assert accumulator.take_grad(9).tolist() == [2.0**9 - 1] * 3


def test_a_directory_that_is_damaged_is_refused(tmp_path: Path) -> None:
    with durable_server(tmp_path, "round") as server, gradserve.connect(server.address, timeout=60) as client:
        client.conditional_accumulator("float32", (3,), shared_name="sum")
    with sqlite3.connect(tmp_path / "state" / "metadata.sqlite") as connection:
        connection.execute("UPDATE accumulator SET spec = 'x'")
    with pytest.raises(AssertionError, match="the record of accumulator 'default/sum' cannot be used"), server:
        pass
