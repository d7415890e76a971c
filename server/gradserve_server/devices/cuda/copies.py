"""Copies between the memory of the host and that of a GPU.

From registered memory, and to it, the GPU copies by itself, at the speed of the bus. Other memory CUDA copies in parts
to memory of its own, while the calling thread waits; here it goes through slots of registered memory, so that the
processor fills one while the GPU empties the other.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.pinning import Pinning
from gradserve_server.devices.device import bytes_of

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]

_SLOT_BYTES = 2 << 20
_NUM_SLOTS = 2
_BYTE = np.dtype(np.uint8)


class _Slot:
    """A piece of registered memory, and when the GPU is done with it."""

    def __init__(self, memory: NDArray[np.uint8], done: Any) -> None:
        self.memory = memory
        self._done = done

    def record(self, stream: Any) -> None:
        self._done.record(stream)

    def wait(self) -> None:
        self._done.synchronize()


class ThreadCopies:
    """The copies of one thread, on its stream."""

    def __init__(self, cupy: Any, stream: Any, pinning: Pinning, allocate: Allocate) -> None:
        """Takes CuPy, the stream, what registers memory, and what allocates memory of the host."""
        self._cuda = cupy.cuda
        self._stream = stream
        self._pinning = pinning
        self._allocate = allocate
        self._slots: list[_Slot] | None = None

    def upload(self, source: NDArray[Any], target: int) -> None:
        """Starts to copy a C-contiguous array to an address of the GPU.

        Until the stream is done, the array must stay, unchanged.
        """
        num_bytes = source.nbytes
        slots = () if num_bytes <= _SLOT_BYTES or self._pinning.pin(source) else self._pinned_slots()
        if not slots:
            self._to_device(target, source, num_bytes)
            return
        data = bytes_of(source)
        for index, begin in enumerate(range(0, num_bytes, _SLOT_BYTES)):
            slot = slots[index % len(slots)]
            part = data[begin : begin + _SLOT_BYTES]
            slot.wait()
            slot.memory[: part.size] = part
            self._to_device(target + begin, slot.memory, part.size)
            slot.record(self._stream)

    def download(self, source: int, target: NDArray[Any]) -> None:
        """Starts to copy from an address of the GPU to a C-contiguous array.

        The array is filled when the stream is done.
        """
        num_bytes = target.nbytes
        slots = () if num_bytes <= _SLOT_BYTES or self._pinning.pin(target) else self._pinned_slots()
        if not slots:
            self._to_host(target, source, num_bytes)
            return
        data = bytes_of(target)
        parts = [data[begin : begin + _SLOT_BYTES] for begin in range(0, num_bytes, _SLOT_BYTES)]
        for index in range(len(parts) + 1):
            if index < len(parts):
                slot = slots[index % len(slots)]
                self._to_host(slot.memory, source + index * _SLOT_BYTES, parts[index].size)
                slot.record(self._stream)
            if index:
                before, part = slots[(index - 1) % len(slots)], parts[index - 1]
                before.wait()
                part[...] = before.memory[: part.size]

    def _pinned_slots(self) -> list[_Slot]:
        """Returns the slots of this thread; none if memory cannot be registered."""
        if self._slots is None:
            memories = [self._allocate((_SLOT_BYTES,), _BYTE) for _ in range(_NUM_SLOTS)]
            if all(map(self._pinning.pin, memories)):
                event = self._cuda.Event
                self._slots = [_Slot(memory, event(block=True, disable_timing=True)) for memory in memories]
            else:
                self._slots = []
        return self._slots

    def _to_device(self, target: int, source: NDArray[Any], num_bytes: int) -> None:
        runtime = self._cuda.runtime
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(target, source.ctypes.data, num_bytes, kind, self._stream.ptr)

    def _to_host(self, target: NDArray[Any], source: int, num_bytes: int) -> None:
        runtime = self._cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(target.ctypes.data, source, num_bytes, kind, self._stream.ptr)
