"""What client and server need of CUDA's driver, libcuda.so.1, which is there wherever a GPU is used.

CuPy, PyTorch and JAX allocate memory in the primary context of a GPU; so everything here happens in that context, in
any thread. The numbers and signatures are those of cuda.h, which never change.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, NamedTuple, Protocol

HANDLE_BYTES = 64
"""The length of a handle of memory, and of one of an event (CU_IPC_HANDLE_SIZE)."""
UUID_BYTES = 16

_LIBRARY = "libcuda.so.1"
_BUFFER_ID = 7
_DEVICE_ORDINAL = 9
_CAN_BE_SHARED = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE."""
_BLOCKING_EVENT, _NO_TIMING, _INTERPROCESS = 1, 2, 4
_NON_BLOCKING_STREAM = 1


class GpuError(Exception):
    """CUDA's driver says no, or is not there."""


class Allocation(NamedTuple):
    """What one call of cudaMalloc has allocated, or another process has handed over.

    Attributes:
        base: The address of its first byte.
        num_bytes: Its size.
        buffer_id: What tells it from another allocation at this address, before or afterwards.
        can_be_shared: Whether CUDA can hand it to another process.
    """

    base: int
    num_bytes: int
    buffer_id: int
    can_be_shared: bool


class Gpu(Protocol):
    """One GPU, as this process sees it. Safe to use from several threads.

    Everything raises GpuError if the driver says no.

    Attributes:
        uuid: What tells it from all other GPUs, 16 bytes.
        stream: A stream (cudaStream_t) of this process's own: work that tensors depend on is done before what comes
            next in it, and copies take place in it.
    """

    uuid: bytes
    stream: int

    def allocation_of(self, address: int) -> Allocation:
        """Returns the allocation in which an address is."""
        ...

    def index_of(self, address: int) -> int:
        """Returns the index of the GPU, this one or another, in whose memory an address is."""
        ...

    def memory_handle(self, base: int) -> bytes:
        """Returns the handle with which another process opens an allocation, given the address of its first byte."""
        ...

    def new_event(self) -> int:
        """Returns an event that other processes can wait for."""
        ...

    def event_handle(self, event: int) -> bytes:
        """Returns the handle with which another process opens an event."""
        ...

    def record(self, event: int) -> None:
        """Makes an event done when everything is that is in the stream so far."""
        ...

    def wait_for_stream(self, other: int) -> None:
        """Makes what comes next in the stream wait for everything that is in another one so far."""
        ...

    def read(self, address: int, target: Any) -> None:
        """Fills a C-contiguous array of NumPy from memory of the GPU, after what is in the stream."""
        ...

    def write(self, address: int, source: Any) -> None:
        """Copies a C-contiguous array of NumPy to memory of the GPU, after what is in the stream; waits for it."""
        ...


class DriverGpu:
    """A GPU, through the driver; see `Gpu`."""

    def __init__(self, library: Any, index: int) -> None:
        """Takes the driver's library, and the index of the GPU as CUDA counts in this process.

        Raises:
            GpuError: There is no such GPU.
        """
        self._library = library
        self._lock = threading.Lock()
        self._call("cuInit", c_uint(0))
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), c_int(index))
        uuid = (c_char * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.uuid = uuid.raw
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(stream), c_uint(_NON_BLOCKING_STREAM))
            between = self._new_event(_NO_TIMING)
        assert stream.value is not None, "the driver has made it"
        self.stream = stream.value
        self._between = between

    def allocation_of(self, address: int) -> Allocation:
        """See `Gpu`."""
        base, size = c_void_p(), c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), c_void_p(address))
            buffer_id = self._attribute(_BUFFER_ID, c_ulonglong(), address)
            can_be_shared = self._attribute(_CAN_BE_SHARED, c_int(), address)
        assert base.value is not None, "an address is in an allocation that begins somewhere"
        return Allocation(base.value, size.value, buffer_id, bool(can_be_shared))

    def index_of(self, address: int) -> int:
        """See `Gpu`."""
        with self._current():
            return self._attribute(_DEVICE_ORDINAL, c_int(), address)

    def memory_handle(self, base: int) -> bytes:
        """See `Gpu`."""
        handle = (c_char * HANDLE_BYTES)()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), c_void_p(base))
        return handle.raw

    def new_event(self) -> int:
        """See `Gpu`."""
        with self._current():
            return self._new_event(_INTERPROCESS | _NO_TIMING | _BLOCKING_EVENT)

    def event_handle(self, event: int) -> bytes:
        """See `Gpu`."""
        handle = (c_char * HANDLE_BYTES)()
        with self._current():
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), c_void_p(event))
        return handle.raw

    def record(self, event: int) -> None:
        """See `Gpu`."""
        with self._current():
            self._call("cuEventRecord", c_void_p(event), c_void_p(self.stream))

    def wait_for_stream(self, other: int) -> None:
        """See `Gpu`."""
        with self._lock, self._current():
            self._call("cuEventRecord", c_void_p(self._between), c_void_p(other))
            self._call("cuStreamWaitEvent", c_void_p(self.stream), c_void_p(self._between), c_uint(0))

    def read(self, address: int, target: Any) -> None:
        """See `Gpu`."""
        with self._current():
            place, size = c_void_p(target.ctypes.data), c_size_t(target.nbytes)
            self._call("cuMemcpyDtoHAsync_v2", place, c_void_p(address), size, c_void_p(self.stream))
            self._call("cuStreamSynchronize", c_void_p(self.stream))

    def write(self, address: int, source: Any) -> None:
        """See `Gpu`."""
        with self._current():
            place, size = c_void_p(source.ctypes.data), c_size_t(source.nbytes)
            self._call("cuMemcpyHtoDAsync_v2", c_void_p(address), place, size, c_void_p(self.stream))
            self._call("cuStreamSynchronize", c_void_p(self.stream))

    def _new_event(self, flags: int) -> int:
        event = c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), c_uint(flags))
        assert event.value is not None, "the driver has made it"
        return event.value

    def _attribute(self, number: int, value: Any, address: int) -> int:
        self._call("cuPointerGetAttribute", ctypes.byref(value), c_int(number), c_void_p(address))
        found: int = value.value
        return found

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(c_int(status), ctypes.byref(text))
            raise GpuError(f"{name} fails with {(text.value or b'error').decode()} ({status})")


def load_library() -> Any:
    """Returns the driver's library.

    Raises:
        GpuError: It is not there.
    """
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise GpuError(f"CUDA's driver is not there: {error}") from None


@cache
def open_gpu(index: int) -> Gpu:
    """Returns the GPU with an index, always the same object.

    Raises:
        GpuError: There is no driver, or no such GPU.
    """
    return DriverGpu(load_library(), index)
