"""`python -m benchmarks.gpu.copies`: copies between host and GPU, beside the bus and CUDA's own way.

Needs a GPU and CuPy. The bus is what one copy from or to memory that CUDA has allocated reaches. Implementations take
turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.check.verdict import Verdict, judged, tell
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.cuda.device import CudaDevice

NUM_BYTES = 256 << 20
REPEATS = 9
TARGET_OF_BUS = 0.9
TARGET_OF_CUDA = 0.95

_UP = "uploads of pooled memory have the speed of the bus"
_DOWN = "downloads to pooled memory have the speed of the bus"
_OTHER_UP = "uploads of other memory are no slower than CUDA's own"
_OTHER_DOWN = "downloads to other memory are no slower than CUDA's own"
CLAIMS = (_UP, _DOWN, _OTHER_UP, _OTHER_DOWN)

_PART = "copies"
_BYTE = np.dtype(np.uint8)


def verdicts(device: CudaDevice, cupy: Any) -> Iterator[Verdict]:
    """Measures one claim after the other."""
    pool = BufferPool(2 * NUM_BYTES)
    there = device.empty((NUM_BYTES,), _BYTE)
    pooled, other = pool.empty((NUM_BYTES,), _BYTE), np.empty(NUM_BYTES, np.uint8)
    pooled[:] = other[:] = 1
    memory = cupy.cuda.alloc_pinned_memory(NUM_BYTES)
    pinned = np.frombuffer(memory, np.uint8, NUM_BYTES)
    beside: list[tuple[str, Callable[[], object], Callable[[], object], float]] = [
        (_UP, lambda: device.write(there, 0, pooled), lambda: _set(device, there, pinned), TARGET_OF_BUS),
        (_DOWN, lambda: device.read(there, 0, pooled), lambda: _get(device, there, pinned), TARGET_OF_BUS),
        (_OTHER_UP, lambda: device.write(there, 0, other), lambda: _set(device, there, other), TARGET_OF_CUDA),
        (_OTHER_DOWN, lambda: device.read(there, 0, other), lambda: _get(device, there, other), TARGET_OF_CUDA),
    ]
    for claim, ours, theirs, target in beside:
        seconds = _medians(ours, theirs)
        print(f"{claim}: {NUM_BYTES / seconds[0] / 1e9:.1f} GB/s beside {NUM_BYTES / seconds[1] / 1e9:.1f}", flush=True)
        yield judged(_PART, claim, seconds[1] / seconds[0], target, "x")


def _set(device: CudaDevice, there: Any, source: np.ndarray) -> None:
    with device.computing():
        there.set(source)


def _get(device: CudaDevice, there: Any, target: np.ndarray) -> None:
    with device.computing():
        there.get(out=target)


def _medians(*calls: Callable[[], object]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()  # registers memory, and wakes up the bus
    for _ in range(REPEATS):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [statistics.median(each) for each in times]


def main() -> None:
    """Measures, and tells the verdicts."""
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"this benchmark needs an NVIDIA GPU and CuPy: {error}")
    for verdict in verdicts(CudaDevice(0), cupy):
        tell([verdict])


if __name__ == "__main__":
    main()
