"""`python -m benchmarks.gpu.accumulators`: sums and averages of gradients on a GPU, beside a copy and PyTorch.

Needs a GPU and CuPy; compares with PyTorch's `_foreach` functions where torch is installed for CUDA. The gradients are
those of a model of many components, large enough to come from memory. Implementations take turns.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.check.verdict import Status, Verdict, judged, tell
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.reduction import CudaReducer

SIZES = (*[1 << 22] * 48, *[1 << 18] * 200, *[1000] * 400)
"""The elements of each component: 254 million, most of them in large ones."""
NUM_HELD = 8
REPEATS = 7
TARGET_BANDWIDTH = 0.8
TARGET_SPEED = 1.0

_ADD = "a gradient is added at the bandwidth of a copy: float32"
_ADD_HALF = "a gradient is added at the bandwidth of a copy: bfloat16 to sums of float32"
_ORDERED = f"{NUM_HELD} gradients are averaged in one pass, in the order of their workers"
_TORCH = "a gradient is added as fast as by torch._foreach_add_"
CLAIMS = (_ADD, _ADD_HALF, _ORDERED, _TORCH)

_PART = "accumulators"
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


class Bench:
    """Gradients and sums on a GPU, and what measures it."""

    def __init__(self, device: CudaDevice, cupy: Any) -> None:
        self._device = device
        self._reducer = CudaReducer(device)
        self._watch = gpu.Stopwatch(cupy)
        self._cupy = cupy
        self.num_elements = sum(SIZES)
        self.copy_bandwidth = self._watch.copy_bandwidth()

    def filled(self, dtype: np.dtype[Any]) -> list[Any]:
        """Returns new components of one value."""
        arrays = [self._device.empty((size,), dtype) for size in SIZES]
        for array in arrays:
            array.data.memset_async(0x3C, array.nbytes)
        return arrays

    def seconds(self, *calls: Callable[[], object]) -> list[float]:
        """Returns the median time of each call; they take turns."""
        times: list[list[float]] = [[] for _ in calls]
        for call in calls:
            call()
        for _ in range(REPEATS):
            for call, taken in zip(calls, times, strict=True):
                taken.append(self._watch.time_alone(call))
        return [statistics.median(each) for each in times]

    def of_copy(self, num_bytes: int, seconds: float) -> float:
        """Returns a bandwidth as a part of a copy's."""
        return num_bytes / seconds / self.copy_bandwidth

    def verdicts(self) -> Iterator[Verdict]:
        """Measures one claim after the other."""
        totals = self.filled(_FLOAT32)
        for claim, dtype in ((_ADD, _FLOAT32), (_ADD_HALF, _BFLOAT16)):
            gradient = self.filled(dtype)
            (seconds,) = self.seconds(lambda given=gradient: self._reducer.add_scaled(totals, given, 0.5))  # type: ignore[misc]
            moved = self.num_elements * (2 * _FLOAT32.itemsize + dtype.itemsize)
            yield judged(_PART, claim, self.of_copy(moved, seconds), TARGET_BANDWIDTH, "x")
        held = [self.filled(_FLOAT32) for _ in range(NUM_HELD)]
        factors = [1.0] * NUM_HELD
        dtypes = [_FLOAT32] * len(SIZES)
        (seconds,) = self.seconds(
            lambda: self._reducer.add_up(held, factors, float(NUM_HELD), dtypes, None, totals),
        )
        moved = self.num_elements * _FLOAT32.itemsize * (NUM_HELD + 1)
        yield judged(_PART, _ORDERED, self.of_copy(moved, seconds), TARGET_BANDWIDTH, "x")
        yield self._beside_torch(totals, held[0])

    def _beside_torch(self, totals: Sequence[Any], gradient: Sequence[Any]) -> Verdict:
        if importlib.util.find_spec("torch") is None:
            return Verdict(_PART, _TORCH, Status.SKIP, "PyTorch is not installed")
        import torch

        if not torch.cuda.is_available():
            return Verdict(_PART, _TORCH, Status.SKIP, "PyTorch is not installed for CUDA")
        theirs, given = ([torch.from_dlpack(each) for each in arrays] for arrays in (totals, gradient))

        def by_torch() -> None:
            with gpu.torch_on_stream(torch, self._cupy.cuda.get_current_stream()):
                torch._foreach_add_(theirs, given, alpha=0.5)

        ours, seconds = self.seconds(lambda: self._reducer.add_scaled(totals, gradient, 0.5), by_torch)
        return judged(_PART, _TORCH, seconds / ours, TARGET_SPEED, "x")


def main() -> None:
    """Measures, and tells the verdicts."""
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"this benchmark needs an NVIDIA GPU and CuPy: {error}")
    device = CudaDevice(0)
    with device.computing():
        bench = Bench(device, cupy)
        print(f"copy: {bench.copy_bandwidth / 1e9:.0f} GB/s", flush=True)
        for verdict in bench.verdicts():
            tell([verdict])


if __name__ == "__main__":
    main()
