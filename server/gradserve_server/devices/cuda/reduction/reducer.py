"""Element-wise arithmetic on lists of arrays in the memory of a GPU."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.kernels import ELEMENTS, Programs
from gradserve_server.devices.cuda.program import CompiledProgram, Limits, Program
from gradserve_server.devices.cuda.reduction import kernels
from gradserve_server.devices.cuda.reduction.kernels import KEYS, Key, SumsKey, ValuesKey
from gradserve_server.devices.device import Array
from gradserve_server.devices.host.reduction.finite import Place

KeyT = TypeVar("KeyT")


class ReductionDevice(Protocol):
    """A GPU that runs kernels, and has the tables that tell them where arrays are. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """The properties that decide how work is cut into blocks."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array; raises MemoryError if there is not enough memory."""
        ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a copy of a host array; raises MemoryError if there is not enough memory."""
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns a copy of an array in host memory."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def address(self, array: Array) -> int:
        """Returns the address of the elements of an array."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of memory that this thread's next kernels may overwrite."""
        ...

    def tickets(self, count: int) -> int:
        """Returns the address of counters, which are 0 before and after every kernel."""
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device."""
        ...


class _Row(NamedTuple):
    """One array of results, the sum that it begins with, and what is added."""

    out: Array
    total: Array | None
    sources: tuple[Array, ...]


class CudaReducer:
    """Scales, adds and divides lists of C-contiguous arrays of one GPU. Safe to use from several threads.

    A list of arrays takes one launch for each combination of dtypes. Every operation on every element is rounded by
    itself, in the dtype of sums, and subnormal numbers are kept, so that the results have the bits of the host's
    `Reducer`; only the bits of a NaN may differ.

    Methods return when the results are there.
    """

    def __init__(self, device: ReductionDevice) -> None:
        """Takes the GPU."""
        self._device = device
        self._programs: Programs[Key] = Programs(device, kernels.program, KEYS)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two programs, once `stop()` is true."""
        self._programs.prepare(stop)

    def make_ready(self, dtypes: Iterable[tuple[np.dtype[Any], np.dtype[Any]]]) -> None:
        """Compiles what adds gradients to sums, given the dtypes of both, so that computing with them cannot fail.

        Raises:
            cupy.cuda.compiler.CompileException: It does not compile.
        """
        for each in set(dtypes):
            self._programs.make_ready(SumsKey(*each))

    def scale(self, sources: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
        """Computes out = source factor for each, in the dtype of `out`.

        Args:
            sources: The arrays to scale.
            factor: The factor.
            outs: The results; each is either its `source` itself or other memory.
        """
        pairs = zip(sources, outs, strict=True)
        rows = [_Row(out, None, (source,)) for source, out in pairs if source is not out or factor != 1.0]
        self._combine(rows, (factor,), None)

    def add_scaled(self, totals: Sequence[Array], sources: Sequence[Array], factor: float) -> None:
        """Computes total += source factor for each, in the dtype of `total`."""
        rows = [_Row(total, total, (source,)) for total, source in zip(totals, sources, strict=True)]
        self._combine(rows, (factor,), None)

    def divide(self, totals: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        """Computes out = total / divisor for each, in the dtype of `total`, then rounded to that of `out`.

        Args:
            totals: The dividends.
            divisor: The divisor.
            outs: The results; each is either its `total` itself or other memory.
        """
        pairs = zip(totals, outs, strict=True)
        self._combine([_Row(out, total, ()) for total, out in pairs if total is not out or divisor != 1.0], (), divisor)

    def add_and_divide(
        self,
        totals: Sequence[Array],
        sources: Sequence[Array],
        factor: float,
        divisor: float,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (total + source factor) / divisor for each; see `add_scaled` and `divide`.

        Args:
            totals: The sums.
            sources: What is added.
            factor: The factor of the sources.
            divisor: The divisor.
            outs: The results; each is either its `total` itself or other memory.
        """
        rows = zip(outs, totals, ((source,) for source in sources), strict=True)
        self._combine([_Row(*row) for row in rows], (factor,), divisor)

    def needs_totals(self, num_gradients: int) -> bool:
        """Returns True if sums are in memory between two launches."""
        return num_gradients > kernels.MAX_SOURCES

    def add_up(
        self,
        gradients: Sequence[Sequence[Array]],
        factors: Sequence[float],
        divisor: float,
        dtypes: Sequence[np.dtype[Any]],
        totals: Sequence[Array] | None,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (first gradient * its factor + second gradient * its factor + ...) / divisor, in this order.

        It reads each gradient once. Between 16 gradients and the next 16, the sums are in `totals`.

        Args:
            gradients: The lists of arrays to add, at least one.
            factors: The factor of each list.
            divisor: The divisor.
            dtypes: The dtypes of the sums.
            totals: Memory for the sums, None if `needs_totals` says so.
            outs: The results; each is either its `total` itself or other memory.
        """
        most = kernels.MAX_SOURCES
        for first in range(0, len(gradients), most):
            some = gradients[first : first + most]
            ends = first + most >= len(gradients)
            begun: Sequence[Array | None] = [None] * len(outs)
            if first:
                assert totals is not None, "see `needs_totals`"
                begun = totals
            results = outs if ends or totals is None else totals
            rows = [_Row(*row) for row in zip(results, begun, zip(*some, strict=True), strict=True)]
            self._combine(rows, factors[first : first + most], divisor if ends else None, dtypes)

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite.

        Raises:
            MemoryError: There is not enough memory.
        """
        found = []
        for dtype, indices in _grouped([(index, array.dtype) for index, array in enumerate(arrays) if array.size]):
            rows = [(arrays[index].size, 0, self._device.address(arrays[index])) for index in indices]
            place = self._check(ValuesKey(dtype), kernels.find_name(dtype), rows, kernels.tile_size(dtype))
            if place is not None:
                found.append(Place(indices[place.array], place.position))
        return min(found, default=None)

    def converts(self, dtype: np.dtype[Any]) -> bool:
        """Returns True if arrays of a dtype can be converted."""
        return dtype in ELEMENTS

    def converted(self, array: Array, dtype: np.dtype[Any]) -> tuple[Array, int | None]:
        """Returns an array rounded to another floating dtype, and the position of the first value that is lost.

        That is a finite one that becomes infinite.

        Raises:
            MemoryError: There is not enough memory.
        """
        out = self._device.empty(array.shape, dtype)
        if not array.size:
            return out, None
        row = (array.size, self._device.address(out), self._device.address(array))
        name, tile = kernels.convert_name(array.dtype, dtype), kernels.tile_size(array.dtype, dtype)
        lost = self._check(ValuesKey(dtype), name, [row], tile)
        return out, None if lost is None else lost.position

    def _combine(
        self,
        rows: Sequence[_Row],
        factors: Sequence[float],
        divisor: float | None,
        total_dtypes: Sequence[np.dtype[Any]] | None = None,
    ) -> None:
        """Computes rows, given the dtypes of their sums if nothing else says them."""
        keys = [
            (index, _key(row, None if total_dtypes is None else total_dtypes[index]))
            for index, row in enumerate(rows)
            if row.out.size
        ]
        for (key, result), indices in _grouped(keys):
            self._combine_alike(key, result, [rows[index] for index in indices], factors, divisor)

    def _combine_alike(
        self,
        key: SumsKey,
        result: np.dtype[Any],
        rows: Sequence[_Row],
        factors: Sequence[float],
        divisor: float | None,
    ) -> None:
        arguments = np.zeros((), kernels.COMBINE)
        arguments["num_sources"], arguments["has_sum"] = len(factors), rows[0].total is not None
        arguments["divides"] = divisor is not None
        with np.errstate(over="ignore"):
            arguments["factors"][: len(factors)] = [float(key.total.type(factor)) for factor in factors]
            arguments["divisor"] = 1.0 if divisor is None else float(key.total.type(divisor))
        at = self._device.address
        words = [
            (row.out.size, at(row.out), 0 if row.total is None else at(row.total), *map(at, row.sources))
            for row in rows
        ]
        name, tile = kernels.combine_name(key, result), kernels.tile_size(key.gradient, key.total)
        try:
            self._launch(key, name, arguments, words, tile)
        except MemoryError:  # for the table of many rows
            few = kernels.most_inline(words)
            for first in range(0, len(words), few):
                self._launch(key, name, arguments, words[first : first + few], tile)

    def _check(self, key: ValuesKey, kernel: str, rows: Sequence[Sequence[int]], tile: int) -> Place | None:
        """Runs a kernel that looks for elements; returns the place of the first one that it has found."""
        arguments = np.zeros((), kernels.CHECK)
        with self._device.computing():
            found = self._device.from_host(np.array([kernels.NOTHING], np.uint64))
            arguments["found"] = self._device.address(found)
            self._launch(key, kernel, arguments, rows, tile)
        place = int(self._device.to_host(found)[0])
        if place == kernels.NOTHING:
            return None
        return Place(place >> kernels.POSITION_BITS, place & ((1 << kernels.POSITION_BITS) - 1))

    def _launch(self, key: Key, kernel: str, arguments: NDArray[Any], rows: Sequence[Sequence[int]], tile: int) -> None:
        """Runs a kernel for rows; returns when it is done.

        Raises:
            MemoryError: There is not enough memory for the table of many rows; nothing has changed.
        """
        words, num_tiles = kernels.table_of(rows, tile)
        arguments["num_rows"] = len(rows)
        with self._device.computing():  # for the table, which nothing else keeps
            if words.size > kernels.INLINE_WORDS:
                table = self._device.from_host(words)
                arguments["table"] = self._device.address(table)
            else:
                arguments["table"] = 0
                arguments["rows"][: words.size] = words.reshape(-1)
            launch = kernels.launch(kernel, arguments, num_tiles, self._device.limits)
            self._programs[key].launch(launch, arguments)


def _key(row: _Row, total: np.dtype[Any] | None) -> tuple[SumsKey, np.dtype[Any]]:
    """Returns the dtypes of a row, given that of its sum if it has none."""
    result = row.out.dtype
    if row.total is not None:
        total = row.total.dtype
    gradient = row.sources[0].dtype if row.sources else result
    return SumsKey(gradient, result if total is None else total), result


def _grouped(items: Iterable[tuple[int, KeyT]]) -> list[tuple[KeyT, list[int]]]:
    """Groups numbers by what belongs to them."""
    groups: dict[KeyT, list[int]] = {}
    for number, what in items:
        groups.setdefault(what, []).append(number)
    return list(groups.items())
