"""The memory of a GPU, as CuPy's pool allocates it.

CuPy keeps what is freed for the next arrays of the same stream, and every thread that uses a GPU has a stream of its
own. An arena that all streams share would need less memory, but kernels could write to memory that others still read:
an array that is freed inside a `computing` block goes back to its arena at once (`SingleDeviceMemoryPool.free` in CuPy
14.2's memory.pyx records no event and waits for nothing), while the kernels that use it may not have begun. Within a
stream that is right, for the next kernels come after them. So the arenas stay apart, there are few threads
(`DEVICE_THREADS`), and what the arenas keep is bounded; it also goes back whenever something cannot be allocated. To
give it back is safe at any time, as cudaFree waits for whatever runs on the device.
"""

import importlib
from typing import Any

_MARGIN_BYTES = 2 << 30
_LEAST_PART_OF_MARGIN = 8
_SLACK_BYTES = 64 << 20
_KEPT_PART = 8
"""Of its limit, the pool keeps at most this part for later while nothing happens: one in eight."""
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
        cached_bytes: What it kept for later when it was last looked at.
        other_bytes: What was used then that is not the pool's.
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
        """Limits the pool to this, and a little more: allocations are rounded up, and blocks do not fill each other."""
        self._limit = min(num_bytes + max(num_bytes // _KEPT_PART, _SLACK_BYTES), self.usable_bytes)

    def apply_limit(self) -> None:
        """Tells CuPy the limit, which takes it for the GPU that the calling thread uses."""
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
        """Gives back everything that the pool keeps for later. Waits for work on the GPU."""
        self._pool.free_all_blocks()

    def trim(self) -> None:
        """Does the same if it keeps more than an eighth of its limit."""
        if self._pool.free_bytes() > self._limit // _KEPT_PART:
            self._pool.free_all_blocks()

        self.cached_bytes = self._pool.free_bytes()

    def look(self) -> None:
        """Notes what is used of the GPU's memory, and by whom."""
        free, total = self._runtime.memGetInfo()
        self.other_bytes = max(total - free - self._pool.total_bytes(), 0)
        self.cached_bytes = self._pool.free_bytes()


def _is(error: BaseException, module: str, name: str) -> bool:
    """Returns True if an error is of a class of CuPy's, which is imported only if it may be."""
    if type(error).__name__ != name:
        return False
    try:
        return isinstance(error, getattr(importlib.import_module(f"cupy_backends.cuda.{module}"), name))
    except ImportError:
        return False
