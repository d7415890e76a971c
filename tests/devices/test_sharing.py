"""Kernels whose work threads share without Python."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.host import jit
from gradserve_server.devices.host.board import CALLS, SPINNING
from gradserve_server.devices.host.intrinsics import DONE, count_up, yield_processor
from gradserve_server.devices.host.kernels import ChunkedKernels, Declared, ForkJoin, Kernel, KernelTable
from gradserve_server.tensors.spec import FLOAT64
from tests.servers.polling import PATIENCE_SECONDS, eventually

_TAKEN, _PATIENCE = 1, 300_000


def square(values: Any, squares: Any, counters: Any) -> None:
    """One value for each chunk."""
    chunk = count_up(counters, _TAKEN)
    while chunk < len(values):
        squares[chunk] += values[chunk] * values[chunk]
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def meet(num_threads: Any, met: Any, counters: Any) -> None:
    """Waits for this many threads, but not forever: helpers that are about to sleep may not come."""
    count_up(met, 0)
    for _ in range(_PATIENCE):
        if met[0] >= num_threads:
            break
        yield_processor()


def divide(values: Any, quotients: Any, counters: Any) -> None:
    """Divides by zero."""
    for index in range(len(values)):
        quotients[index] = values[index] / 0


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    square: Kernel
    meet: Kernel
    divide: Kernel


TABLE = KernelTable(
    what="shared kernels",
    package=__package__,
    kernels=Kernels,
    types={FLOAT64: {}},
    declared={
        "square": Declared("test_sharing.square", "const float64[], float64[]"),
        "meet": Declared("test_sharing.meet", "int64, int64[]"),
        "divide": Declared("test_sharing.divide", "const float64[], float64[]"),
    },
)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    compiled = TABLE.compile(FLOAT64, lambda: False)
    assert compiled is not None
    return compiled


@pytest.fixture
def parallel() -> Iterator[ForkJoin]:
    fork_join = ForkJoin(3)
    yield fork_join
    fork_join.close()


@pytest.mark.parametrize("num_chunks", [1, 2, 1000])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_chunk_is_done_once(kernels: Kernels, num_threads: int, num_chunks: int) -> None:
    parallel, values = ForkJoin(num_threads), np.arange(num_chunks, dtype=np.float64)
    for _ in range(20):
        squares = np.zeros_like(values)
        kernels.run(parallel, kernels.square, (values, squares), num_chunks)
        np.testing.assert_array_equal(squares, values**2)
    parallel.close()


def test_helpers_take_part_asleep_or_awake(kernels: Kernels, parallel: ForkJoin) -> None:
    def num_threads() -> int:
        met = np.zeros(1, np.int64)
        kernels.run(parallel, kernels.meet, (3, met), 3)
        return int(met[0])

    for is_asleep in (True, False, False, True):
        if is_asleep:
            eventually(lambda: parallel.num_sleeping == 2)
        eventually(num_threads, lambda number: number == 3)


def test_a_job_that_begins_as_a_helper_leaves_the_board_is_helped() -> None:
    """A helper that has watched the board, and waits for the GIL so that it can sleep, cannot be woken up yet."""
    parallel, is_leaving, may_leave, has_come_back = ForkJoin(2), *(threading.Event() for _ in range(3))

    def attend(*_arguments: object) -> None:
        if is_leaving.is_set():
            has_come_back.set()
        is_leaving.set()
        may_leave.wait(PATIENCE_SECONDS)

    def next_job(*_arguments: object) -> None:
        may_leave.set()
        assert has_come_back.wait(PATIENCE_SECONDS)

    parallel.run_shared(attend, lambda *_arguments: is_leaving.wait(PATIENCE_SECONDS), (), 2)
    parallel.run_shared(attend, next_job, (), 2)
    parallel.close()


def test_one_chunk_is_for_the_caller_alone(kernels: Kernels, parallel: ForkJoin) -> None:
    eventually(lambda: parallel.num_sleeping == 2)
    met = np.zeros(1, np.int64)
    kernels.run(parallel, kernels.meet, (1, met), 1)
    assert (met[0], parallel.num_sleeping) == (1, 2)


def test_python_gets_helpers_that_wait_for_kernels(kernels: Kernels, parallel: ForkJoin) -> None:
    for _ in range(20):
        kernels.run(parallel, kernels.meet, (3, np.zeros(1, np.int64)), 3)
        together = threading.Barrier(3, timeout=PATIENCE_SECONDS)
        parallel.run(together.wait, 3)


def test_more_callers_than_jobs_at_once(kernels: Kernels, parallel: ForkJoin) -> None:
    def call(seed: int) -> bool:
        values = np.random.default_rng(seed).standard_normal(50)
        for _ in range(50):
            squares = np.zeros_like(values)
            kernels.run(parallel, kernels.square, (values, squares), len(values))
            if not np.array_equal(squares, values**2):
                return False
        return True

    with ThreadPoolExecutor(12) as callers:
        assert all(callers.map(call, range(12)))


def test_helpers_sleep_when_there_is_no_more_work(kernels: Kernels, parallel: ForkJoin) -> None:
    kernels.run(parallel, kernels.meet, (3, np.zeros(1, np.int64)), 3)
    eventually(lambda: parallel.num_sleeping == 2)


def test_a_helper_without_work_and_allowance_does_not_wait(kernels: Kernels) -> None:
    """It is back at once, and was counted while it looked."""
    board = np.zeros((5, 16), np.int64)
    kernels.attend(board, 0, 0, 1 << 60)
    assert not board.any()


def test_a_helper_that_waits_is_called_away(kernels: Kernels) -> None:
    board = np.zeros((5, 16), np.int64)
    helper = threading.Thread(target=kernels.attend, args=(board, 0, 1 << 60, 1 << 60))
    helper.start()
    eventually(lambda: board[0, SPINNING] == 1)
    board[0, CALLS] += 1
    helper.join()
    assert board[0, SPINNING] == 0


@pytest.mark.parametrize(("processors", "waits"), [({0}, False), ({0, 1}, True)])
def test_nobody_waits_awake_where_there_is_one_processor(
    processors: set[int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: processors)
    parallel = ForkJoin(2)
    longest: list[int] = []
    parallel.run_shared(lambda board, calls, allowance, most: longest.append(most), lambda *arguments: None, (), 2)
    eventually(lambda: longest)
    parallel.close()
    assert (longest[0] > 0) == waits


def test_close_ends_helpers_that_wait(kernels: Kernels) -> None:
    before = set(threading.enumerate())
    parallel = ForkJoin(3)
    kernels.run(parallel, kernels.meet, (3, np.zeros(1, np.int64)), 3)
    parallel.close()
    assert set(threading.enumerate()) <= before


def test_arithmetic_is_that_of_kernels(kernels: Kernels, parallel: ForkJoin) -> None:
    """Dividing by zero is no error, which would end the kernel without a word."""
    quotients = np.zeros(3)
    kernels.run(parallel, kernels.divide, (np.array([1.0, -1.0, 0.0]), quotients), 1)
    np.testing.assert_array_equal(quotients, [np.inf, -np.inf, np.nan])


def test_the_cache_forgets_shared_kernels_when_sharing_changes() -> None:
    assert {"sharing.py", "board.py", "test_sharing.py"} <= {file.name for file in jit._source_files(Path(__file__))}
