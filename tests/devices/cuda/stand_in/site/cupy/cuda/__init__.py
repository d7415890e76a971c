"""CuPy's interface of CUDA."""

from .._machine import MACHINE as _MACHINE
from . import compiler, runtime
from . import device as device
from . import memory as memory
from . import pinned_memory as pinned_memory
from . import stream as stream
from .device import Device, get_cublas_handle, get_device_id
from .memory import (
    BaseMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    set_allocator,
    using_allocator,
)
from .pinned_memory import (
    PinnedMemory,
    PinnedMemoryPointer,
    PinnedMemoryPool,
    alloc_pinned_memory,
    set_pinned_memory_allocator,
)
from .stream import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time


def is_available() -> bool:
    return _MACHINE.settings.num_gpus > 0


__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "compiler",
    "get_allocator",
    "get_cublas_handle",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "runtime",
    "set_allocator",
    "set_pinned_memory_allocator",
    "using_allocator",
]
