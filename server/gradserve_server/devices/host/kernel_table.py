"""Tables of kernels for the host: the function, the dtypes and the arguments of each.

A table is data, which declares kernels without importing Numba: functions are imported when they are compiled.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.parallel import ForkJoin

Kernel: TypeAlias = Callable[..., None]

_COUNTERS = "int64[]"
_ATTEND = "int64[2], int64, int64, int64"
_NUM_COUNTERS = 5
"""The most counters of a kernel; see `intrinsics`."""

ELEMENTS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float16): "int16",
    np.dtype(ml_dtypes.bfloat16): "uint16",
    np.dtype(np.float32): "float32",
    np.dtype(np.float64): "float64",
}
"""The types in which kernels take elements of each dtype: integers for 16-bit floats, which Numba does not have."""

_log = logging.getLogger(__name__)


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array aligned for kernels, copied if needed: inline inputs lie anywhere in their message."""
    return array if array.flags.aligned else array.copy()


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the elements of an array for kernels: aligned, in one dimension, 16-bit floats as integers."""
    return aligned(array).reshape(-1).view(ELEMENTS[array.dtype])


@dataclass(frozen=True)
class ChunkedKernels:
    """Kernels that take chunks of their work until none is left.

    Any number of threads may do a kernel's work with the same arguments, at the same time or later; a single one does
    all of it. The result does not depend on the number of threads. The last argument of each function is an array of
    counters; the compiled kernels are shared, see `sharing`.
    """

    attend: Kernel

    def run(self, parallel: ForkJoin, kernel: Kernel, arguments: tuple[Any, ...], num_chunks: int) -> None:
        """Runs a kernel on all threads of `parallel` that are free, until all its chunks are done."""
        counters = np.zeros(_NUM_COUNTERS, np.int64)
        parallel.run_shared(self.attend, kernel, (*arguments, counters), num_chunks)


@dataclass(frozen=True)
class Declared:
    """A kernel of a table.

    Attributes:
        function: "module.function", in the package of the table.
        arguments: The types that it takes, as in C: "const {T}[], int64, float64[3]" are a read-only array, a number,
            and an array of three axes; arrays are contiguous. Names in braces come from the types of the table.
    """

    function: str
    arguments: str


KernelsT = TypeVar("KernelsT")


@dataclass(frozen=True)
class KernelTable(Generic[KernelsT]):
    """Kernels that are compiled together for one dtype.

    Attributes:
        what: What they compute, for the log.
        package: The package with the modules of the functions.
        kernels: The dataclass of the compiled kernels. Those of `ChunkedKernels` get counters as a last argument.
        types: For each dtype, the meaning of names in braces, in the order in which dtypes are prepared.
        declared: The kernels, by their names in the dataclass.
        contract: Whether a product and a sum may be computed with one rounding, on processors that can.
    """

    what: str
    package: str
    kernels: type[KernelsT]
    types: Mapping[np.dtype[Any], Mapping[str, str]]
    declared: Mapping[str, Declared]
    contract: bool = True

    def compile(self, dtype: np.dtype[Any], stop: Callable[[], bool]) -> KernelsT | None:
        """Compiles the kernels for a dtype, or loads them from the cache; returns None once `stop()`.

        The first call imports Numba, which takes half a second.

        Raises:
            KernelError: One does not compile for this machine's processor, or needs symbols that the process does not
                have.
        """
        from gradserve_server.devices.host import jit, sharing

        compiled: dict[str, Kernel] = {}
        is_chunked = issubclass(self.kernels, ChunkedKernels)
        if is_chunked:
            compiled["attend"] = jit.compile_kernel(sharing.attend, jit.argument_types(_ATTEND), contract=self.contract)
        compile_kernel = jit.compile_shared_kernel if is_chunked else jit.compile_kernel
        for name, (function, arguments) in self._functions(dtype):
            if stop():
                return None
            all_arguments = f"{arguments}, {_COUNTERS}" if is_chunked else arguments
            compiled[name] = compile_kernel(function, jit.argument_types(all_arguments), contract=self.contract)
        return self.kernels(**compiled)

    def _functions(self, dtype: np.dtype[Any]) -> Iterator[tuple[str, tuple[Kernel, str]]]:
        for name, declared in self.declared.items():
            module, _, function = declared.function.format(**self.types[dtype]).rpartition(".")
            arguments = declared.arguments.format(**self.types[dtype])
            yield name, (getattr(importlib.import_module(f"{self.package}.{module}"), function), arguments)

    def __post_init__(self) -> None:
        """Checks that every kernel of the dataclass is declared."""
        own: Any = self.kernels
        assert {field.name for field in fields(own)} - {"attend"} == set(self.declared), self.what


class PreparedKernels(Generic[KernelsT]):
    """The compiled kernels of some tables, by dtype.

    One thread prepares them, while others may use those that are ready.
    """

    def __init__(self, *tables: KernelTable[KernelsT]) -> None:
        self._tables = tables
        self._ready: dict[np.dtype[Any], KernelsT] = {}

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from the cache; ends early, between two kernels, once `stop()`.

        A dtype whose kernels cannot be compiled has none; the log says so in one line.
        """
        from gradserve_server.devices.host.jit import KernelError

        for table in self._tables:
            for dtype in table.types:
                try:
                    kernels = table.compile(dtype, stop)
                except KernelError as error:
                    _log.warning("no kernels of %s for %s, NumPy computes instead: %s", table.what, dtype, error)
                    continue
                if kernels is None:
                    return
                self._ready[dtype] = kernels

    def get(self, dtype: np.dtype[Any]) -> KernelsT | None:
        """Returns the kernels for a dtype, if they are ready."""
        return self._ready.get(dtype)
