"""The state of each thread that uses a GPU: its stream, its counts, and its copies between host and GPU.

The GPU copies registered memory by itself, at the speed of the bus. CUDA copies other memory in parts to its own
buffers, while the calling thread waits; here it goes through slots of registered memory instead, so that the processor
fills one slot while the GPU empties the other.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import MappedMemory, memory_of
from gradserve_server.devices.device import Allocate, Array, bytes_of

_log = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 20
"""Registering memory takes about as long as copying it once unregistered. Smaller maps are copied unregistered."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly."""

_Gone: TypeAlias = "SimpleQueue[tuple[int, object] | None]"
"""The addresses of maps to unregister, each with the map, which stays alive until then; None at the end."""


class Pinning:
    """Registers host memory with CUDA: each map once, when it first takes part in a copy. Pooled maps are then reused.

    Safe to use from several threads. A dedicated thread unregisters a map before its memory is freed, because
    finalizers run in any thread, and CUDA may wait.
    """

    def __init__(self, cupy: Any, use_device: Callable[[], None]) -> None:
        """Takes CuPy, and a function that makes the GPU current in the calling thread."""
        self._runtime = cupy.cuda.runtime
        self._use_device = use_device
        self._lock = threading.Lock()
        self._is_pinned: weakref.WeakKeyDictionary[MappedMemory, bool] = weakref.WeakKeyDictionary()
        self._gone: _Gone | None = None
        self._has_failed = False

    def pin(self, array: NDArray[Any]) -> bool:
        """Registers the map of an array if possible; returns True if the array is in registered memory."""
        memory = memory_of(array)
        if memory is None or memory.num_bytes < _LEAST_BYTES:
            return False
        with self._lock:
            known = self._is_pinned.get(memory)
            if known is not None:
                return known
            # While one thread registers it, others copy it unregistered.
            self._is_pinned[memory] = False
        try:
            self._runtime.hostRegister(memory.address, memory.num_bytes, 0 if memory.is_writable else _READ_ONLY)
        except self._runtime.CUDARuntimeError as error:
            self._note(error)
            return False
        with self._lock:
            weakref.finalize(memory, self._queue().put, (memory.address, memory.map)).atexit = False
            self._is_pinned[memory] = True
        return True

    def _note(self, error: Exception) -> None:
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            _log.warning("memory cannot be registered with CUDA, copies of it are slower: %s", error)

    def _queue(self) -> _Gone:
        if self._gone is None:
            gone: _Gone = SimpleQueue()
            self._gone = gone
            arguments = (self._runtime, self._use_device, gone)
            threading.Thread(target=_forget, args=arguments, name="gradserve-unpin", daemon=True).start()
            weakref.finalize(self, gone.put, None).atexit = False
        return self._gone


def _forget(runtime: Any, use_device: Callable[[], None], gone: _Gone) -> None:
    """Unregisters maps from CUDA before they are unmapped."""
    use_device()
    while (each := gone.get()) is not None:
        address, _map = each
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            _log.warning("memory stays registered with CUDA: %s", error)
        del each, _map


@dataclass(slots=True)
class Counts:
    """Counts of what one thread has done. Only that thread writes them."""

    num_compiled: int = 0
    num_launches: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    wait_seconds: float = 0.0


class ThreadCounts:
    """The counts of all threads, ended ones included. Each thread writes its own, without a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: list[Counts] = []

    def new(self) -> Counts:
        """Returns the counts for a new thread."""
        with self._lock:
            self._counts.append(Counts())
            return self._counts[-1]

    def total(self) -> Counts:
        """Returns the sums over all threads."""
        with self._lock:
            counts = list(self._counts)

        def sum_of(pick: Callable[[Counts], float]) -> float:
            return sum(map(pick, counts))

        return Counts(
            int(sum_of(lambda each: each.num_compiled)),
            int(sum_of(lambda each: each.num_launches)),
            int(sum_of(lambda each: each.bytes_to_device)),
            int(sum_of(lambda each: each.bytes_to_host)),
            sum_of(lambda each: each.wait_seconds),
        )


_SLOT_BYTES = 2 << 20
_NUM_SLOTS = 2
_BYTE = np.dtype(np.uint8)


class _Slot:
    """Registered memory for one part of a copy, and the event that says when the GPU is done with it."""

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
        """Takes CuPy, the stream, the registration of memory, and the allocator of host memory."""
        self._cuda = cupy.cuda
        self._stream = stream
        self._pinning = pinning
        self._allocate = allocate
        self._slots: list[_Slot] | None = None

    def upload(self, source: NDArray[Any], target: int) -> None:
        """Starts to copy a C-contiguous array to an address of the GPU.

        The array must stay unchanged until the stream is done.
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
        """Returns the slots of this thread; an empty list if memory cannot be registered."""
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


_POLLING_SECONDS = 50e-6
"""Seconds for which a thread polls whether its work is done, which takes a core. Then it sleeps: waking up takes some
tens of microseconds, as much as a small kernel."""


class DeviceThread:
    """A thread's state on a device; `depth` counts its nested blocks that make the device current."""

    def __init__(self, stream: Any, finished: Any, copies: ThreadCopies, counts: Counts) -> None:
        self.stream = stream
        self.copies = copies
        self.counts = counts
        self.depth = 0
        self.scratch: Array | None = None
        self.tickets: Array | None = None
        self.held: list[object] = []
        """Objects that must stay alive until the stream is done."""
        self._finished = finished

    def wait(self) -> None:
        """Returns when everything in the stream is done."""
        self._finished.record(self.stream)
        begin = now = time.perf_counter()
        while not self._finished.done:
            if now - begin >= _POLLING_SECONDS:
                self._finished.synchronize()
                now = time.perf_counter()
                break
            now = time.perf_counter()
        self.counts.wait_seconds += now - begin
        self.held.clear()
