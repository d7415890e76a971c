"""CUDA C++ programs: their sources, their kernels compiled for a GPU or in advance, and the launches of these.

Importing this needs neither a GPU nor CuPy.
"""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.cuda.threads import Counts
from gradserve_server.devices.device import Array

_DEFINITION = 'extern "C" __global__ '
COMPILE_OPTIONS = ("--std=c++17",)
"""Options for NVRTC. CuPy adds the architecture and `-ftz=true`."""


@dataclass(frozen=True)
class Limits:
    """The properties of a device that decide how work is cut into blocks.

    Attributes:
        num_multiprocessors: The number of its streaming multiprocessors.
        shared_bytes: The most dynamic shared memory that a block may use.
        element_blocks: The most blocks of a kernel over elements for each multiprocessor: twice the number that runs
            at a time. For more work, threads take several elements or vectors.
    """

    num_multiprocessors: int
    shared_bytes: int
    element_blocks: int = 16


@dataclass(frozen=True)
class Program:
    """Kernels of one source, each of which NVRTC compiles separately.

    Attributes:
        name: Its name, for messages.
        source: CUDA C++ that includes no header. With several kernels, the definition of each is one line.
        kernels: The names of its kernels, which are `extern "C"`, the most usual first.
    """

    name: str
    source: str
    kernels: tuple[str, ...]

    def source_of(self, kernel: str) -> str:
        """Returns the source without the other kernels, which would take most of the time to compile it."""
        if len(self.kernels) == 1:
            return self.source
        lines = self.source.splitlines()
        return "\n".join(line for line in lines if not line.startswith(_DEFINITION) or f" {kernel}(" in line)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel whose only argument is a struct.

    Attributes:
        kernel: The name of the kernel.
        grid: The number of blocks along x and y.
        threads: The number of threads in a block, along x.
        shared_bytes: The dynamic shared memory of a block.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int


class CompiledProgram(Protocol):
    """A program on one device. Safe to use from several threads."""

    def prepare(self, kernel: str) -> None:
        """Compiles a kernel, or loads it from a cache, unless it is ready."""
        ...

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel after everything that this thread started before; `arguments` is its struct.

        Compiles it first if necessary.
        """
        ...


class KernelDevice(Protocol):
    """A device for launching kernels. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """The properties that decide how work is cut into blocks."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a copy of a host array in this device's memory.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns a copy of an array in host memory."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def address(self, array: Array) -> int:
        """Returns the address of the elements of an array on this device."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of this thread's scratch memory, which its next kernels may overwrite.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def tickets(self, count: int) -> int:
        """Returns the address of this thread's uint32 counters, which are 0 before and after every kernel.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device. Its kernels are compiled when they are first needed."""
        ...


def element_sources() -> tuple[str, ...]:
    """Returns the sources with which every program begins: the PTX for float16, then all other code for elements."""
    folder = resources.files(__package__)
    return tuple((folder / f"{name}.cu").read_text(encoding="utf-8") for name in ("half", "floats", "elements"))


ELEMENTS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float16): "Half",
    np.dtype(ml_dtypes.bfloat16): "BFloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
}
"""The C++ type of the elements of each dtype; see floats.cu."""

ELEMENT_THREADS = 256

KeyT = TypeVar("KeyT")


def instance(name: str, bounds: str, struct: str, template: str) -> str:
    """Returns the definition of a kernel, which instantiates a template.

    Args:
        name: The name of the kernel.
        bounds: The arguments of `__launch_bounds__`.
        struct: The C++ type of its only argument.
        template: The function template, with its arguments.
    """
    return (
        f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(const __grid_constant__ {struct} arguments) '
        f"{{ {template}(arguments); }}"
    )


def element_launch(kernel: str, count: int, limits: Limits, *, width: int = 1) -> Launch:
    """Returns the launch of a kernel for `count` elements, at least one, of which threads take `width` at a time."""
    blocks = min(-(-count // (width * ELEMENT_THREADS)), limits.element_blocks * limits.num_multiprocessors)
    return Launch(kernel, (blocks, 1), ELEMENT_THREADS, 0)


@dataclass(frozen=True)
class Struct:
    """The only argument of a kernel: the addresses of its arrays, then int64 numbers, then float64 numbers.

    Attributes:
        arrays: The names of the arrays.
        numbers: The names of the int64 numbers.
        floats: The names of the float64 numbers.
    """

    arrays: tuple[str, ...]
    numbers: tuple[str, ...]
    floats: tuple[str, ...] = ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The struct in the layout of C++."""
        kinds = ((self.arrays, np.uint64), (self.numbers, np.int64), (self.floats, np.float64))
        return np.dtype([(name, kind) for names, kind in kinds for name in names])

    def of(self, addresses: Mapping[str, int], numbers: Mapping[str, float]) -> NDArray[Any]:
        """Returns the argument of a launch, with the addresses and numbers that the struct has."""
        arguments = np.zeros((), self.dtype)
        for name in self.arrays:
            arguments[name] = addresses[name]
        for name in (*self.numbers, *self.floats):
            arguments[name] = numbers[name]
        return arguments


class Programs(Generic[KeyT]):
    """The programs of a family on one device. Kernels are compiled when they are first needed, or all in advance."""

    def __init__(self, device: KernelDevice, program: Callable[[KeyT], Program], keys: Iterable[KeyT]) -> None:
        self._device = device
        self._program = program
        self._keys = tuple(keys)
        self._programs: dict[KeyT, CompiledProgram] = {}

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        for key in self._keys:
            if not self._prepare(key, stop):
                return

    def make_ready(self, key: KeyT) -> None:
        """Compiles all kernels of a program, or loads them from a cache, so that a launch cannot fail for that."""
        self._prepare(key, lambda: False)

    def __getitem__(self, key: KeyT) -> CompiledProgram:
        """Returns a program. Safe to call from several threads."""
        known = self._programs.get(key)
        if known is None:
            known = self._programs[key] = self._device.compiled(self._program(key))
        return known

    def _prepare(self, key: KeyT, stop: Callable[[], bool]) -> bool:
        """Compiles the kernels of a program; returns False if `stop()` ended this before the last one."""
        for kernel in self._program(key).kernels:
            if stop():
                return False
            self[key].prepare(kernel)
        return True


INSTALLED = Path(sys.prefix, "share", "gradserve", "kernels")
"""The folder of kernels compiled at installation. Like the program itself, the installing user writes it."""
NVRTC_OPTIONS = (*COMPILE_OPTIONS, "-ftz=true", "--device-as-default-execution-space")
"""Our options, and those that CuPy adds."""

_DIGEST_BYTES = 16

_log = logging.getLogger(__name__)


class Cubins:
    """Compiled kernels in a folder. A file's name has digests of its source and content, so it need not be trusted."""

    def __init__(self, folder: Path, architecture: str, compiler: tuple[int, int]) -> None:
        """Looks for kernels.

        Args:
            folder: The folder, which need not exist.
            architecture: The kind of GPU, such as "sm_90".
            compiler: The version of NVRTC. Kernels of another one are not used, since they may round differently.
        """
        self._folder = folder
        self._meaning = repr((architecture, compiler, NVRTC_OPTIONS)).encode()
        self._architecture = architecture
        self._files: dict[str, str] = {}
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
        except OSError as error:
            _log.warning("compiled CUDA kernels cannot be read, and are compiled again: %s", error)
            names = []
        for name in names:
            source, _, rest = name.partition("-")
            if rest.endswith(".cubin"):
                self._files[source] = name

    def find(self, source: str) -> str | None:
        """Returns the path of a compiled source; None if there is none, or only one that is damaged."""
        name = self._files.get(self._source_digest(source))
        if name is None:
            return None
        path = self._folder / name
        try:
            if name == self._name(source, path.read_bytes()):
                return str(path)
            problem: object = f"{path} is damaged"
        except OSError as error:
            problem = error
        _log.warning("a compiled CUDA kernel cannot be read, and is compiled again: %s", problem)
        return None

    def save(self, source: str, cubin: bytes) -> None:
        """Saves a compiled source in the folder.

        Raises:
            OSError: It cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._name(source, cubin)
        unfinished = self._folder / f"{name}.{os.getpid()}.part"
        unfinished.write_bytes(cubin)
        unfinished.replace(self._folder / name)
        self._files[self._source_digest(source)] = name

    def _name(self, source: str, cubin: bytes) -> str:
        return f"{self._source_digest(source)}-{self._architecture}-{_digest(cubin)}.cubin"

    def _source_digest(self, source: str) -> str:
        return _digest(self._meaning + b"\0" + source.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


class CudaProgram:
    """A `CompiledProgram` on one GPU.

    Each kernel is compiled separately, when it is first needed, by one thread. Threads that need the same kernel wait
    for it; threads that need another do not.
    """

    def __init__(
        self,
        cupy: Any,
        program: Program,
        limits: Limits,
        current: Callable[[], AbstractContextManager[None]],
        counts: Callable[[], Counts],
        cubins: Cubins | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            cupy: CuPy.
            program: The program.
            limits: The limits of the GPU.
            current: Makes the GPU current.
            counts: Returns the counts of the calling thread.
            cubins: Kernels compiled in advance.
        """
        self._cupy = cupy
        self._counts = counts
        self._program = program
        self._limits = limits
        self._current = current
        self._cubins = cubins
        self._compiling = {name: threading.Lock() for name in program.kernels}
        self._kernels: dict[str, Any] = {}

    def prepare(self, kernel: str) -> None:
        """Compiles a kernel, or loads the compiled one, unless it is ready.

        Raises:
            cupy.cuda.compiler.CompileException: It does not compile.
        """
        with self._compiling[kernel]:
            if kernel in self._kernels:
                return
            source = self._program.source_of(kernel)
            cubin = None if self._cubins is None else self._cubins.find(source)
            with self._current():
                if cubin is not None:
                    module = self._cupy.RawModule(path=cubin)
                else:
                    module = self._cupy.RawModule(code=source, options=COMPILE_OPTIONS, backend="nvrtc")
                function = module.get_function(kernel)
                function.max_dynamic_shared_size_bytes = self._limits.shared_bytes
            self._counts().num_compiled += 1
            self._kernels[kernel] = function

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel on CuPy's current stream. CuPy passes an array of one element by value.

        Raises:
            cupy.cuda.compiler.CompileException: It does not compile.
        """
        checkpoint()
        if launch.kernel not in self._kernels:
            self.prepare(launch.kernel)
        self._counts().num_launches += 1
        self._kernels[launch.kernel](launch.grid, (launch.threads,), (arguments,), shared_mem=launch.shared_bytes)
