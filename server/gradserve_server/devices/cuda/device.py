"""GPUs, through CuPy, and their memory, as CuPy's pool allocates it.

CuPy keeps what is freed for the next arrays of the same stream, and every thread that uses a GPU has its own stream. An
arena that all streams share would need less memory, but kernels could write to memory that others still read: an array
that is freed inside a `computing` block goes back to its arena at once (`SingleDeviceMemoryPool.free` in CuPy 14.2's
memory.pyx records no event and waits for nothing), while the kernels that use it may not have begun. Within a stream
that is right, for the next kernels come after them. So the arenas stay apart, there are few threads (`DEVICE_THREADS`),
and what the arenas keep is bounded; it is also freed whenever an allocation fails. Freeing it is safe at any time,
because cudaFree waits for whatever runs on the device.
"""

import functools
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.importing import import_cupy
from gradserve_server.devices.cuda.programs import INSTALLED, CompiledProgram, Cubins, CudaProgram, Limits, Program
from gradserve_server.devices.cuda.threads import Counts, DeviceThread, Pinning, ThreadCopies, ThreadCounts
from gradserve_server.devices.device import Allocate, Array, DeviceUsage

_MARGIN_BYTES = 2 << 30
_LEAST_PART_OF_MARGIN = 8
_SLACK_BYTES = 64 << 20
_KEPT_PART = 8
"""While idle, the pool keeps at most one part in this many of its limit for later."""
_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY, as well as cudaErrorMemoryAllocation."""
_CUBLAS_OUT_OF_MEMORY = (1, 3)
"""CUBLAS_STATUS_NOT_INITIALIZED and CUBLAS_STATUS_ALLOC_FAILED. `cublasCreate`, which makes a thread's handle before
its first product, usually returns the former where no memory is left; nothing else in CuPy causes it."""


def usable_bytes(total: int) -> int:
    """Returns how much of a GPU's memory the pool may take.

    The rest is for what CUDA, cuBLAS and cuDNN allocate themselves, which otherwise fails: the context with its heaps
    for printf and malloc (0.5 GiB on an H100), the modules of cuDNN and cuBLAS, loaded lazily (up to 0.5 GiB), cuBLAS's
    workspaces (32 MiB for each thread), cuDNN's dropout states, and the modules of our own kernels. That is 2 GiB, or
    an eighth of the memory of small GPUs.
    """
    return total - min(_MARGIN_BYTES, total // _LEAST_PART_OF_MARGIN)


class GpuMemory:
    """The pool of one GPU.

    All methods but `limit` are for threads that use this GPU, and safe to call from several.

    Attributes:
        usable_bytes: How much of the GPU's memory the pool may take.
        cached_bytes: Memory that the pool kept for later at the last `trim` or `look`.
        other_bytes: Memory of the GPU in use outside the pool at the last `look`.
    """

    def __init__(self, cupy: Any, total: int) -> None:
        """Takes CuPy, and the size of the GPU's memory in bytes."""
        self._runtime = cupy.cuda.runtime
        self._pool = cupy.get_default_memory_pool()
        self.usable_bytes = usable_bytes(total)
        self._limit = self.usable_bytes
        self.cached_bytes = 0
        self.other_bytes = 0

    def limit(self, num_bytes: int) -> None:
        """Limits the pool to little more than this: allocations are rounded up, and blocks leave gaps."""
        self._limit = min(num_bytes + max(num_bytes // _KEPT_PART, _SLACK_BYTES), self.usable_bytes)

    def apply_limit(self) -> None:
        """Sets CuPy's limit for the GPU that the calling thread uses."""
        self._pool.set_limit(size=self._limit)

    def is_full(self, error: BaseException) -> bool:
        """Returns True if an error says that the GPU's memory does not suffice: of CuPy, cuDNN, CUDA or cuBLAS."""
        if isinstance(error, MemoryError):
            return True
        status = getattr(error, "status", None)
        if _is(error, "api.runtime", "CUDARuntimeError") or _is(error, "api.driver", "CUDADriverError"):
            return status == _OUT_OF_MEMORY
        return _is(error, "libs.cublas", "CUBLASError") and status in _CUBLAS_OUT_OF_MEMORY

    def free_cached(self) -> None:
        """Frees everything that the pool keeps for later. Waits for work on the GPU."""
        self._pool.free_all_blocks()

    def trim(self) -> None:
        """Frees what the pool keeps for later if that is more than an eighth of its limit."""
        if self._pool.free_bytes() > self._limit // _KEPT_PART:
            self._pool.free_all_blocks()
        self.cached_bytes = self._pool.free_bytes()

    def look(self) -> None:
        """Notes how much of the GPU's memory is cached by the pool, and how much is in use outside it."""
        free, total = self._runtime.memGetInfo()
        self.other_bytes = max(total - free - self._pool.total_bytes(), 0)
        self.cached_bytes = self._pool.free_bytes()


def _is(error: BaseException, module: str, name: str) -> bool:
    """Returns True if an error is of a class of CuPy's; imports that class only if the name matches."""
    if type(error).__name__ != name:
        return False
    try:
        return isinstance(error, getattr(importlib.import_module(f"cupy_backends.cuda.{module}"), name))
    except ImportError:
        return False


class CudaDevice:
    """One GPU. The first one imports CuPy.

    Every thread that uses it uses no other GPU, and has its own stream. Arrays may pass from thread to
    thread: they are complete when the `computing` block that filled them is left, and if their readers keep them until
    they leave their own blocks, the memory is not reused before.

    bfloat16 is ml_dtypes', which CuPy 14 knows with NumPy 2.1.2 or newer.
    """

    inline_bytes = 0
    """Zero: kernels may wait for others, so they never run on the event loop."""

    def __init__(self, index: int, allocate: Allocate = np.empty, precompiled: Path = INSTALLED) -> None:
        """Opens the GPU.

        Args:
            index: The index of the GPU, as CUDA counts.
            allocate: Allocates memory of the host for copies.
            precompiled: The folder of kernels compiled in advance, which need not exist.

        Raises:
            ImportError: CuPy is not installed.
            cupy.cuda.runtime.CUDARuntimeError: There is no driver, or no such GPU.
        """
        self._cupy = cupy = import_cupy()
        self.name = f"cuda:{index}"
        self.index = index
        self._device = cupy.cuda.Device(index)
        attributes = self._device.attributes
        self.limits = Limits(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])
        self._threads = threading.local()
        self._counts = ThreadCounts()
        self._programs: dict[Program, CudaProgram] = {}
        self._precompiled = precompiled
        self._allocate = allocate
        self._pinning = Pinning(cupy, self._device.use)
        # Not asked of the device: leaving a block with it would make a context on GPU 0.
        self._memory = GpuMemory(cupy, cupy.cuda.runtime.getDeviceProperties(index)["totalGlobalMem"])

    @property
    def memory_bytes(self) -> int:
        """The bytes of its memory that CuPy's pool may take; CUDA needs the rest."""
        return self._memory.usable_bytes

    def limit_memory(self, num_bytes: int) -> None:
        """Limits the pool. Called before any thread uses the GPU."""
        self._memory.limit(num_bytes)

    def is_full(self, error: BaseException) -> bool:
        """Returns True if an error says that the GPU's memory does not suffice."""
        return self._memory.is_full(error)

    def free_cached(self) -> None:
        """Frees the memory that the pool keeps for later. Waits for all work on the GPU."""
        with self._current():
            self._memory.free_cached()

    def trim(self) -> None:
        """Frees the memory kept for later if it exceeds an eighth of the pool's limit; updates `usage`."""
        with self._current():
            self._memory.trim()
            self._memory.look()

    def usage(self) -> DeviceUsage:
        """Returns figures of the GPU. Memory outside the pool is as of the last `trim`."""
        counts = self._counts.total()
        return DeviceUsage(
            cached_bytes=self._memory.cached_bytes,
            other_bytes=self._memory.other_bytes,
            num_compiled=counts.num_compiled,
            num_launches=counts.num_launches,
            bytes_to_device=counts.bytes_to_device,
            bytes_to_host=counts.bytes_to_host,
            wait_seconds=counts.wait_seconds,
        )

    def holds(self, array: Array) -> bool:
        """Returns True if an array is in this GPU's memory."""
        return isinstance(array, self._cupy.ndarray) and array.device == self._device

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array from CuPy's memory pool.

        Raises:
            MemoryError: There is not enough memory, even after the pool has freed what it holds for later.
        """
        if self._thread().depth:
            return self._cupy.empty(shape, dtype)
        with self._current():
            return self._cupy.empty(shape, dtype)

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a copy in this GPU's memory.

        Raises:
            MemoryError: There is not enough memory.
        """
        copy = self.empty(array.shape, array.dtype)
        self.write(copy, 0, np.ascontiguousarray(array))
        return copy

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns a copy in host memory.

        Raises:
            MemoryError: There is not enough memory.
        """
        host: NDArray[Any] = self._allocate(array.shape, array.dtype)
        with self.computing():
            self.read(array, 0, host)
        return host

    def write(self, array: Array, offset: int, source: NDArray[Any]) -> None:
        """Copies the bytes of a C-contiguous host array into an array, from an offset in bytes on.

        In a `computing` block, the host array must not change until the block is left.
        """
        if source.nbytes:
            self._thread().counts.bytes_to_device += source.nbytes
            with self._copying(source) as copies:
                copies.upload(source, self.address(array) + offset)

    def read(self, array: Array, offset: int, target: NDArray[Any]) -> None:
        """Fills a C-contiguous host array with the bytes of an array, from an offset in bytes on.

        In a `computing` block, it is filled when the block is left.
        """
        if target.nbytes:
            self._thread().counts.bytes_to_host += target.nbytes
            with self._copying(target) as copies:
                copies.download(self.address(array) + offset, target)

    @contextmanager
    def _copying(self, host: NDArray[Any]) -> Iterator[ThreadCopies]:
        thread = self._thread()
        if not thread.depth:
            with self.computing():
                yield thread.copies
            return
        thread.held.append(host)  # nobody may reuse its memory before
        yield thread.copies

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Makes this GPU and this thread's stream current in CuPy; waits for the stream at the end."""
        with self._current():
            try:
                yield
            finally:
                self._thread().wait()
        if not self._thread().depth:
            self._memory.trim()

    def why_lost(self) -> str | None:
        """Returns the error with which all work on this GPU fails, None if there is none. Waits for all work on it."""
        runtime = self._cupy.cuda.runtime
        try:
            with self._current():
                runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as error:
            return str(error)
        return None

    @property
    def compute_capability(self) -> str:
        """The kind of GPU, such as "90"."""
        capability: str = self._device.compute_capability
        return capability

    def stream(self) -> int:
        """Returns this thread's stream, a cudaStream_t, the same in all its `computing` blocks."""
        stream: int = self._thread().stream.ptr
        return stream

    def address(self, array: Array) -> int:
        """Returns the address of the elements of an array on this device."""
        address: int = array.data.ptr
        return address

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of this thread's scratch memory, which its next kernels may overwrite.

        Raises:
            MemoryError: There is not enough memory.
        """
        thread = self._thread()
        if thread.scratch is None or thread.scratch.nbytes < num_bytes:
            thread.scratch = None
            thread.scratch = self.empty((_room(num_bytes),), np.dtype(np.uint8))
        return self.address(thread.scratch)

    def tickets(self, count: int) -> int:
        """Returns the address of this thread's uint32 counters, which are 0 before and after every kernel.

        Raises:
            MemoryError: There is not enough memory.
        """
        thread = self._thread()
        if thread.tickets is None or thread.tickets.size < count:
            thread.tickets = None
            with self._current():
                tickets = self._cupy.empty(_room(count), np.uint32)
                tickets.data.memset_async(0, tickets.nbytes)
            thread.tickets = tickets
        return self.address(thread.tickets)

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device; all threads share it.

        Its kernels come from the folder of compiled ones, from CuPy's cache on disk, or else from the compiler.
        """
        known = self._programs.get(program)
        if known is None:
            new = CudaProgram(self._cupy, program, self.limits, self._current, self._own_counts, self._cubins)
            known = self._programs.setdefault(program, new)
        return known

    @functools.cached_property
    def _cubins(self) -> Cubins | None:
        if not self._precompiled.exists():
            return None
        return Cubins(self._precompiled, f"sm_{self.compute_capability}", self._cupy.cuda.nvrtc.getVersion())

    def _own_counts(self) -> Counts:
        return self._thread().counts

    @contextmanager
    def _current(self) -> Iterator[None]:
        thread = self._thread()
        with thread.stream:
            thread.depth += 1
            try:
                yield
            finally:
                thread.depth -= 1

    def _thread(self) -> DeviceThread:
        try:
            thread: DeviceThread = self._threads.state
        except AttributeError:
            # Permanently: leaving a block with this device would go back to GPU 0, and so make a context there.
            self._device.use()
            self._memory.apply_limit()
            cuda = self._cupy.cuda
            finished = cuda.Event(block=True, disable_timing=True)
            stream = cuda.Stream(non_blocking=True)
            copies = ThreadCopies(self._cupy, stream, self._pinning, self._allocate)
            thread = self._threads.state = DeviceThread(stream, finished, copies, self._counts.new())
        return thread


def _room(wanted: int) -> int:
    """Returns twice the bytes, so that growing tensors seldom need new scratch memory."""
    return max(1 << wanted.bit_length(), 1 << 10)
