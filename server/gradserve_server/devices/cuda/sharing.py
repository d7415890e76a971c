"""GPU memory that clients hand over, through CUDA IPC."""

import logging
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from gradserve_protocol.gpu import Gpu, GpuError, open_gpu
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.cuda.importing import import_cupy
from gradserve_server.devices.device import Array, SharingError

_log = logging.getLogger(__name__)

_DONE, _NOT_READY = 0, 600
"""cudaSuccess and cudaErrorNotReady."""


class _Mapping:
    """An open allocation, closed when it is garbage-collected: every array in it refers to it.

    So a kernel that still reads it for a client that is gone ends before the memory is closed.
    """

    def __init__(self, buffer_id: int, num_bytes: int, address: int) -> None:
        self.buffer_id = buffer_id
        self.num_bytes = num_bytes
        self.address = address


@dataclass(frozen=True)
class _Open:
    """The mapping that a handle was opened as. It may be collected before CUDA has closed it."""

    mapping: "weakref.ref[_Mapping]"
    address: int


class CudaEvent:
    """An open event of a client; see `SharedEvent`."""

    def __init__(self, device: CudaDevice, runtime: Any, event: int) -> None:
        self._device = device
        self._runtime = runtime
        self._event = event

    def is_done(self) -> bool:
        try:
            with self._device.computing():
                status: int = self._runtime.eventQuery(self._event)
        except self._runtime.CUDARuntimeError as error:
            raise SharingError(f"the event of the client cannot be asked: {error}") from None
        if status not in (_DONE, _NOT_READY):
            raise SharingError(f"the event of the client ended with status {status}")
        return status == _DONE


class CudaSharing:
    """Opens what clients have allocated on one GPU; see `GpuSharing`.

    A process has each handle open once; connections that hand over the same allocation share it. Closing may wait for
    the GPU, so a dedicated thread does it.
    """

    def __init__(self, device: CudaDevice, gpu: Gpu | None = None) -> None:
        """Takes the GPU, and the same GPU as the driver has it; None for the one of this index.

        Raises:
            GpuError: The driver does not say which GPU it is.
        """
        self.device = device
        self._gpu = gpu = open_gpu(device.index) if gpu is None else gpu
        self.uuid = gpu.uuid
        self._cupy = import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}
        self._unused: deque[bytes | int] = deque()
        """The handles of memory, and the events, to close. Filled by finalizers, in any thread."""
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._closer: threading.Thread | None = None

    def open_memory(self, handle: bytes, buffer_id: int, num_bytes: int) -> Array:
        with self._lock:
            self._close_unused()
            known = self._open.get(handle)
            mapping = self._opened(handle, buffer_id) if known is None else known.mapping()
        problem = _problem_with(mapping, buffer_id, num_bytes)
        if mapping is None or problem is not None:
            mapping = None  # the traceback of an error would keep it open
            raise SharingError(problem)
        memory = self._cupy.cuda.UnownedMemory(mapping.address, num_bytes, mapping, self.device.index)
        return self._cupy.ndarray((num_bytes,), np.dtype(np.uint8), self._cupy.cuda.MemoryPointer(memory, 0))

    def open_event(self, handle: bytes) -> CudaEvent:
        try:
            with self.device.computing():
                event: int = self._runtime.ipcOpenEventHandle(handle)
        except self._runtime.CUDARuntimeError as error:
            raise SharingError(f"the event cannot be opened: {error}") from None
        opened = CudaEvent(self.device, self._runtime, event)
        self._close_when_unused(opened, event)
        return opened

    def close(self) -> None:
        """Ends the thread that closes unused memory and events."""
        if self._closer is not None:
            self._wake.put(False)
            self._closer.join()

    def _opened(self, handle: bytes, buffer_id: int) -> _Mapping:
        try:
            with self.device.computing():
                address: int = self._runtime.ipcOpenMemHandle(handle)
        except self._runtime.CUDARuntimeError as error:
            raise SharingError(f"the memory cannot be opened: {error}") from None
        try:
            size = self._gpu.allocation_of(address).num_bytes
        except GpuError as error:
            self._close_memory(address)
            raise SharingError(f"the size of the memory is not known: {error}") from None
        mapping = _Mapping(buffer_id, size, address)
        self._open[handle] = _Open(weakref.ref(mapping), address)
        self._close_when_unused(mapping, handle)
        return mapping

    def _close_when_unused(self, opened: _Mapping | CudaEvent, key: bytes | int) -> None:
        weakref.finalize(opened, _discard, self._unused, self._wake, key).atexit = False
        if self._closer is None:
            self._closer = threading.Thread(
                target=self._close_from_time_to_time, name="gradserve-gpu-sharing", daemon=True
            )
            self._closer.start()

    def _close_from_time_to_time(self) -> None:
        while self._wake.get():
            with self._lock:
                self._close_unused()

    def _close_unused(self) -> None:
        while self._unused:
            key = self._unused.popleft()
            if isinstance(key, bytes):
                self._close_memory(self._open.pop(key).address)
            else:
                self._close_event(key)

    def _close_event(self, event: int) -> None:
        with suppress(self._runtime.CUDARuntimeError), self.device.computing():
            self._runtime.eventDestroy(event)

    def _close_memory(self, address: int) -> None:
        try:
            with self.device.computing():
                self._runtime.ipcCloseMemHandle(address)
        except self._runtime.CUDARuntimeError as error:
            _log.warning("memory of a client cannot be closed: %s", error)


def _problem_with(mapping: _Mapping | None, buffer_id: int, num_bytes: int) -> str | None:
    # CUDA would open the handle as the memory that it stood for before, until that is closed.
    if mapping is None or mapping.buffer_id != buffer_id:
        return "memory that had the same handle, and has been freed, is still open"
    if num_bytes > mapping.num_bytes:  # reading beyond its end would end all work on the GPU
        return f"expected memory of at least {num_bytes} bytes, got {mapping.num_bytes}"
    return None


def _discard(unused: deque[bytes | int], wake: SimpleQueue[bool], key: bytes | int) -> None:
    # A finalizer, in any thread, maybe within one of the methods above: it takes no lock.
    unused.append(key)
    wake.put(True)
