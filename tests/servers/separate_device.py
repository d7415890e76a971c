"""A device with memory of its own, as a GPU has, made of host memory: nothing else can read its arrays."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice, DeviceUsage, bytes_of
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import FAMILY as BATCH_NORM_LAYER
from gradserve_server.layers.batch_norm.computation import LayerComputation
from gradserve_server.ops.activation.cpu import CpuActivation
from gradserve_server.ops.batch_norm import reference
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM
from gradserve_server.ops.operation import Family
from gradserve_server.ops.runner import arrays_of, with_arrays
from tests.servers.polling import PATIENCE_SECONDS


@dataclass(frozen=True, eq=False)
class SeparateArray:
    """An array that only its device can look into."""

    hidden: np.ndarray

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.hidden.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.hidden.shape

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes


class OutOfSeparateMemoryError(RuntimeError):
    """The memory of the device does not suffice, as libraries say that."""


class SeparateDevice:
    """Counts what is copied to and from it, and how often it has given back what it keeps.

    `threads` has the names of those that used it. Once it has a `failure`, everything on it fails; the next
    `num_shortages` computations have no memory.
    """

    name = "separate:0"
    inline_bytes = 0

    def __init__(self, memory_bytes: int | None = None) -> None:
        """Takes how much memory it has to count and to limit; None for none of that."""
        self.memory_bytes = memory_bytes
        self.copied_in = 0
        self.copied_out = 0
        self.num_freed = 0
        self.num_shortages = 0
        self.failure: str | None = None
        self._threads = threading.local()
        self.threads: set[str] = set()
        self.may_trim = threading.Event()
        self.may_trim.set()

    def limit_memory(self, num_bytes: int) -> None:
        """There is nothing in it that is not counted."""

    def is_full(self, error: BaseException) -> bool:
        return isinstance(error, OutOfSeparateMemoryError)

    def free_cached(self) -> None:
        self.num_freed += 1

    def trim(self) -> None:
        """Takes as long as a test says."""
        assert self.may_trim.wait(PATIENCE_SECONDS)

    def usage(self) -> DeviceUsage:
        return DeviceUsage(
            cached_bytes=1,
            other_bytes=2,
            num_compiled=3,
            num_launches=4,
            bytes_to_device=self.copied_in,
            bytes_to_host=self.copied_out,
            wait_seconds=0.5,
        )

    def why_lost(self) -> str | None:
        return self.failure

    @property
    def is_computing(self) -> bool:
        """Whether this thread is inside `computing`."""
        return getattr(self._threads, "depth", 0) > 0

    def holds(self, array: Any) -> bool:
        return isinstance(array, SeparateArray)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> SeparateArray:
        return SeparateArray(np.empty(shape, dtype))

    def from_host(self, array: np.ndarray) -> SeparateArray:
        assert self.is_computing
        self.copied_in += array.nbytes
        return SeparateArray(array.copy())

    def to_host(self, array: SeparateArray) -> np.ndarray:
        assert self.is_computing
        self.copied_out += array.nbytes
        return array.hidden.copy()

    def write(self, array: SeparateArray, offset: int, source: np.ndarray) -> None:
        assert self.is_computing
        self.copied_in += source.nbytes
        bytes_of(array.hidden)[offset : offset + source.nbytes] = bytes_of(source)

    def read(self, array: SeparateArray, offset: int, target: np.ndarray) -> None:
        assert self.is_computing
        if self.failure is not None:
            raise RuntimeError(self.failure)
        self.copied_out += target.nbytes
        bytes_of(target)[...] = bytes_of(array.hidden)[offset : offset + target.nbytes]

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._threads.depth = getattr(self._threads, "depth", 0) + 1
        self.threads.add(threading.current_thread().name)
        yield
        self._threads.depth -= 1

    def compute(self, function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
        """Calls a function that computes with NumPy's arrays; an input that it returns stays the same array."""
        assert self.is_computing
        if self.failure is not None:
            raise RuntimeError(self.failure)
        if self.num_shortages:
            self.num_shortages -= 1
            raise OutOfSeparateMemoryError("cuBLAS has no memory")
        arrays = arrays_of(inputs)
        wrapped = {id(array.hidden): array for array in arrays.values()}
        outputs = function(with_arrays(inputs, {name: array.hidden for name, array in arrays.items()}), *others)
        found = arrays_of(outputs)
        wrapped |= {id(array): SeparateArray(array) for array in found.values() if id(array) not in wrapped}
        return with_arrays(outputs, {name: wrapped[id(array)] for name, array in found.items()})


class SeparateBatchNorm:
    """The reference, on arrays of the device only."""

    def __init__(self, device: SeparateDevice) -> None:
        self._device = device

    def prepare(self, stop: Callable[[], bool]) -> None:
        """There is nothing to compile."""

    def forward(self, inputs: Any, attributes: Any, geometry: Any) -> Any:
        return self._device.compute(lambda hidden: reference.fused_batch_norm(np, hidden, attributes, geometry), inputs)

    def gradient(self, inputs: Any, attributes: Any, geometry: Any) -> Any:
        return self._device.compute(
            lambda hidden: reference.fused_batch_norm_grad(np, hidden, attributes, geometry), inputs
        )


class SeparateLayers:
    """The CPU's computation of layers, on arrays of the device only."""

    def __init__(self, device: SeparateDevice) -> None:
        self._device = device
        host, parallel = CpuDevice(BufferPool(0)), ForkJoin(1)
        self._layers = LayerComputation(host, np, CpuBatchNorm(host, parallel), CpuActivation(parallel))

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Kernels are not compiled: NumPy computes."""

    def forward(self, inputs: Any, attributes: Any, plan: Any) -> Any:
        return self._device.compute(self._layers.forward, inputs, attributes, plan)

    def backward(self, inputs: Any, attributes: Any, plan: Any) -> Any:
        return self._device.compute(self._layers.backward, inputs, attributes, plan)

    def update(self, inputs: Any, attributes: Any) -> Any:
        return self._device.compute(self._layers.update, inputs, attributes)


def separate_families(device: SeparateDevice) -> Mapping[str, Family]:
    """Returns what the device computes."""
    return {BATCH_NORM: SeparateBatchNorm(device), BATCH_NORM_LAYER: SeparateLayers(device)}
