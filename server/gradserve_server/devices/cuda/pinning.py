"""Registers host memory with CUDA, so that the GPU copies from it and to it by itself, at the speed of the bus."""

import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve.memory.mapped import MappedMemory, memory_of

_log = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 20
"""To register memory takes about as long as to copy it once without. Smaller maps are copied without."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly."""

_Gone: TypeAlias = "SimpleQueue[tuple[int, object] | None]"
"""The addresses of maps to forget, each with the map itself; None at the end."""


class Pinning:
    """Registers maps of memory when they first take part in a copy, once; pooled ones are then used again and again.

    Safe to use from several threads. A map is given back to the system when CUDA has forgotten it, by a thread of its
    own, since finalizers run in any thread, and CUDA may wait.
    """

    def __init__(self, cupy: Any, use_device: Callable[[], None]) -> None:
        """Takes CuPy, and what makes the GPU that of the calling thread."""
        self._runtime = cupy.cuda.runtime
        self._use_device = use_device
        self._lock = threading.Lock()
        self._is_pinned: weakref.WeakKeyDictionary[MappedMemory, bool] = weakref.WeakKeyDictionary()
        self._gone: _Gone | None = None
        self._has_failed = False

    def pin(self, array: NDArray[Any]) -> bool:
        """Returns True if an array is in registered memory, which its map becomes if it can be."""
        memory = memory_of(array)
        if memory is None or memory.num_bytes < _LEAST_BYTES:
            return False
        with self._lock:
            known = self._is_pinned.get(memory)
            if known is not None:
                return known
            # While one thread registers it, others copy without.
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
    """Makes CUDA forget maps before they are unmapped."""
    use_device()
    while (each := gone.get()) is not None:
        address, _map = each
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            _log.warning("memory stays registered with CUDA: %s", error)
        del each, _map
