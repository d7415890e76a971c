"""The bandwidth and the arithmetic of this machine, measured on as many threads as there are cores."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

NUM_THREADS = os.cpu_count() or 1

_SECONDS = 0.03
_REPETITIONS = 5
_MATRIX = 1024


def read_bandwidth(num_bytes: int) -> float:
    """Returns the bytes per second at which threads read this many bytes again and again, each its own part."""
    return _bandwidth(num_bytes, lambda part: (part,), _read)


def stream_bandwidth(num_bytes: int) -> float:
    """Returns the bytes per second at which they read two thirds of this many bytes and write one."""
    return _bandwidth(num_bytes, lambda part: tuple(np.array_split(part[: len(part) // 3 * 3], 3)), _combine)


def arithmetic() -> float:
    """Returns the operations per second of float32 matrix products, one on each thread."""
    operands = [np.ones((3, _MATRIX, _MATRIX), np.float32) for _ in range(NUM_THREADS)]
    operations = 2 * _MATRIX**3 * NUM_THREADS
    return operations / _seconds([partial(np.matmul, each[0], each[1], out=each[2]) for each in operands])


def _bandwidth(
    num_bytes: int, arrays: Callable[[NDArray[Any]], tuple[NDArray[Any], ...]], kernel: Callable[..., None]
) -> float:
    parts = [np.ones(num_bytes // 4 // NUM_THREADS, np.float32) for _ in range(NUM_THREADS)]
    result = np.zeros(1, np.float32)
    return num_bytes / _seconds([partial(kernel, *arrays(part), result) for part in parts])


def _seconds(pieces: list[Callable[[], object]]) -> float:
    """Returns the median time in which all threads do their pieces at the same time."""
    pieces[0]()  # compiles it
    times = []
    for _ in range(_REPETITIONS):
        with ThreadPoolExecutor(len(pieces)) as threads:
            repeat = partial(_repeat, threading.Barrier(len(pieces)))
            times.append(statistics.mean(threads.map(repeat, pieces)))
    return statistics.median(times)


def _repeat(start: threading.Barrier, piece: Callable[[], object]) -> float:
    start.wait()
    began, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < _SECONDS:
        piece()
        count += 1
    return seconds / count


@numba.njit(nogil=True, fastmath=True)
def _read(source: NDArray[Any], result: NDArray[Any]) -> None:
    total = np.float32(0)
    for index in range(len(source)):
        total += source[index]
    result[0] = total


@numba.njit(nogil=True, fastmath=True)
def _combine(first: NDArray[Any], second: NDArray[Any], target: NDArray[Any], result: NDArray[Any]) -> None:
    for index in range(len(target)):
        target[index] = first[index] - second[index] * np.float32(0.5)
