"""GPUs and arrays in their memory, through NVIDIA's driver (libcuda.so.1) alone: no library of arrays is imported.

CuPy, PyTorch and JAX allocate memory in the primary context of a GPU, so everything here happens in that context, in
any thread. Constants and signatures are those of cuda.h, which never change.
"""

import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.errors import InternalError

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
    """An error of CUDA's driver, or no driver."""


class Allocation(NamedTuple):
    """Memory that one call of cudaMalloc has allocated, or that another process has handed over.

    Attributes:
        base: The address of its first byte.
        num_bytes: Its size.
        buffer_id: The id that distinguishes it from earlier and later allocations at the same address.
        can_be_shared: Whether CUDA can hand it to another process.
    """

    base: int
    num_bytes: int
    buffer_id: int
    can_be_shared: bool


class Gpu:
    """One GPU, as this process sees it through the driver. Safe to use from several threads.

    All methods raise GpuError if the driver reports an error.

    Attributes:
        uuid: The 16 bytes that identify the GPU.
        stream: This process's stream (cudaStream_t): copies take place in it, and work that tensors depend on is done
            before whatever comes next in it.
    """

    def __init__(self, library: Any, index: int) -> None:
        """Opens a GPU, given the driver's library and the GPU's CUDA index in this process.

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
        """Returns the allocation that contains an address."""
        base, size = c_void_p(), c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), c_void_p(address))
            buffer_id = self._attribute(_BUFFER_ID, c_ulonglong(), address)
            can_be_shared = self._attribute(_CAN_BE_SHARED, c_int(), address)
        assert base.value is not None, "an address is in an allocation that begins somewhere"
        return Allocation(base.value, size.value, buffer_id, bool(can_be_shared))

    def index_of(self, address: int) -> int:
        """Returns the index of the GPU, this one or another, whose memory contains an address."""
        with self._current():
            return self._attribute(_DEVICE_ORDINAL, c_int(), address)

    def memory_handle(self, base: int) -> bytes:
        """Returns the handle with which another process opens an allocation, given its base address."""
        handle = (c_char * HANDLE_BYTES)()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), c_void_p(base))
        return handle.raw

    def new_event(self) -> int:
        """Returns an event that other processes can wait for."""
        with self._current():
            return self._new_event(_INTERPROCESS | _NO_TIMING | _BLOCKING_EVENT)

    def event_handle(self, event: int) -> bytes:
        """Returns the handle with which another process opens an event."""
        handle = (c_char * HANDLE_BYTES)()
        with self._current():
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), c_void_p(event))
        return handle.raw

    def record(self, event: int) -> None:
        """Completes an event as soon as everything that is in the stream now is done."""
        with self._current():
            self._call("cuEventRecord", c_void_p(event), c_void_p(self.stream))

    def wait_for_stream(self, other: int) -> None:
        """Makes whatever comes next in the stream wait for everything that is in another stream now."""
        with self._lock, self._current():
            self._call("cuEventRecord", c_void_p(self._between), c_void_p(other))
            self._call("cuStreamWaitEvent", c_void_p(self.stream), c_void_p(self._between), c_uint(0))

    def read(self, address: int, target: Any) -> None:
        """Fills a C-contiguous NumPy array from memory of the GPU, after the work in the stream."""
        with self._current():
            place, size = c_void_p(target.ctypes.data), c_size_t(target.nbytes)
            self._call("cuMemcpyDtoHAsync_v2", place, c_void_p(address), size, c_void_p(self.stream))
            self._call("cuStreamSynchronize", c_void_p(self.stream))

    def write(self, address: int, source: Any) -> None:
        """Copies a C-contiguous NumPy array to memory of the GPU after the work in the stream, and waits for it."""
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
        GpuError: There is none.
    """
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise GpuError(f"the CUDA driver cannot be loaded: {error}") from None


@cache
def open_gpu(index: int) -> Gpu:
    """Returns the GPU with this index, always the same object.

    Raises:
        GpuError: There is no driver, or no such GPU.
    """
    return Gpu(load_library(), index)


@contextmanager
def failures() -> Iterator[None]:
    """Turns GpuError into InternalError."""
    try:
        yield
    except GpuError as error:
        raise InternalError(f"a GPU of this machine fails: {error}") from None


@dataclass(frozen=True, eq=False)
class GpuArray:
    """A C-contiguous array in the memory of a GPU, owned by a library in this process.

    Work that the library has queued on the array ends before whatever comes next in `gpu.stream`.

    Attributes:
        gpu: The GPU.
        address: The address of its first element.
        dtype: Its dtype, one that tensors can have.
        shape: Its shape.
        owner: The object that keeps the memory alive.
    """

    gpu: Gpu
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: object = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_host(self) -> NDArray[Any]:
        """Returns a copy in host memory.

        Raises:
            InternalError: CUDA fails.
        """
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            with failures():
                self.gpu.read(self.address, host)
        return host

    def fill(self, values: NDArray[Any]) -> None:
        """Overwrites the elements with those of a host array of the same dtype and shape.

        Raises:
            InternalError: CUDA fails.
        """
        if values.nbytes:
            with failures():
                self.gpu.write(self.address, np.ascontiguousarray(values))
