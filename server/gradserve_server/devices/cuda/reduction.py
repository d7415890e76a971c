"""Element-wise arithmetic on lists of arrays in the memory of a GPU, and its CUDA programs.

G is the dtype of gradients, S that of their sums, O that of the results: one of the two. Importing this needs no GPU.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import (
    ELEMENTS,
    KernelDevice,
    Launch,
    Limits,
    Program,
    Programs,
    element_sources,
    instance,
)
from gradserve_server.devices.device import Array, Place

DType = np.dtype[Any]

THREADS = 256
_VECTORS = 4
_VECTOR_BYTES = 16

MAX_SOURCES = 16
"""The sources that one launch adds up."""
INLINE_WORDS = 400
"""The words of a table that travels with the other arguments, of which CUDA takes 4096 bytes."""
ROW_WORDS = 4
"""The words of a row without sources."""
POSITION_BITS = 44
NOTHING = (1 << 64) - 1
"""The value of a check that has found no element."""


_CONSTANTS = {
    "THREADS": THREADS,
    "VECTORS": _VECTORS,
    "MAX_SOURCES": MAX_SOURCES,
    "INLINE_WORDS": INLINE_WORDS,
    "ROW_WORDS": ROW_WORDS,
    "POSITION_BITS": POSITION_BITS,
}


class SumsKey(NamedTuple):
    """Names the program that adds gradients to sums."""

    gradient: DType
    total: DType


class ValuesKey(NamedTuple):
    """Names the program that checks gradients, and converts others to their dtype."""

    gradient: DType


Key = SumsKey | ValuesKey

_HALF, _BFLOAT16, _SINGLE, _DOUBLE = (
    np.dtype(each) for each in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)

SUMS = (
    SumsKey(_SINGLE, _SINGLE),
    SumsKey(_BFLOAT16, _SINGLE),
    SumsKey(_HALF, _SINGLE),
    SumsKey(_DOUBLE, _DOUBLE),
    SumsKey(_HALF, _HALF),
    SumsKey(_BFLOAT16, _BFLOAT16),
    SumsKey(_SINGLE, _DOUBLE),
    SumsKey(_HALF, _DOUBLE),
    SumsKey(_BFLOAT16, _DOUBLE),
)
"""The dtypes of gradients and of sums that hold every value of them, the most usual first."""
KEYS: tuple[Key, ...] = (*SUMS, *map(ValuesKey, ELEMENTS))

COMBINE = np.dtype(
    [
        *((name, np.int64) for name in ("table", "num_rows", "num_tiles", "tiles_per_block", "num_sources")),
        ("has_sum", np.int64),
        ("divides", np.int64),
        ("divisor", np.float64),
        ("factors", np.float64, (MAX_SOURCES,)),
        ("rows", np.int64, (INLINE_WORDS,)),
    ]
)
"""The argument of kernels that combine."""
CHECK = np.dtype(
    [
        *((name, np.int64) for name in ("table", "found", "num_rows", "num_tiles", "tiles_per_block")),
        ("rows", np.int64, (INLINE_WORDS,)),
    ]
)
"""The argument of kernels that check or convert."""


def combine_name(key: SumsKey, result: DType) -> str:
    """The name of the kernel that combines a sum with gradients; see reduction.cu."""
    return f"combine_{key.gradient.name}_in_{key.total.name}_to_{result.name}"


def find_name(dtype: DType) -> str:
    """The name of the kernel that finds the first element that is not finite."""
    return f"find_non_finite_{dtype.name}"


def convert_name(source: DType, result: DType) -> str:
    """The name of the kernel that converts elements."""
    return f"convert_{source.name}_to_{result.name}"


@functools.cache
def program(key: Key) -> Program:
    """The kernels for some dtypes."""
    constants = [f"constexpr int {name} = {value};" for name, value in _CONSTANTS.items()]
    parts = [*element_sources(), exact_source(), *constants, _source("numbers"), _source("reduction")]
    if isinstance(key, SumsKey):
        name = f"sums of {key.gradient.name} in {key.total.name}"
        instances = {combine_name(key, result): _combination(key, result) for result in dict.fromkeys(key)}
    else:
        name = f"values of {key.gradient.name}"
        instances = _of_values(key.gradient)
    return Program(name, "\n".join([*parts, *instances.values()]), tuple(instances))


def exact_source() -> str:
    """Returns the source of arithmetic that rounds each result by itself, in PTX."""
    return _source("exact")


def tile_size(*dtypes: DType) -> int:
    """The elements of a tile, for kernels that read and write arrays of these dtypes."""
    return THREADS * _VECTORS * (_VECTOR_BYTES // max(dtype.itemsize for dtype in dtypes))


def table_of(rows: Sequence[Sequence[int]], tile: int) -> tuple[NDArray[np.int64], int]:
    """Returns a table, and the number of its tiles.

    Args:
        rows: The number of elements of each array, not 0, and the addresses; see reduction.cu.
        tile: The elements of a tile.
    """
    words = np.empty((len(rows), 1 + len(rows[0])), np.int64)
    words[:, 1:] = rows
    tiles = -(-words[:, 1] // tile)
    ends = np.cumsum(tiles)
    words[:, 0] = ends - tiles
    return words, int(ends[-1])


def most_inline(rows: Sequence[Sequence[int]]) -> int:
    """Returns how many of some rows a table may have that travels with the other arguments."""
    return INLINE_WORDS // (1 + len(rows[0]))


def launch_tiles(kernel: str, arguments: NDArray[Any], num_tiles: int, limits: Limits) -> Launch:
    """Returns the launch of a kernel for a number of tiles, and notes in its argument how blocks share them."""
    most = limits.element_blocks * limits.num_multiprocessors
    per_block = -(-num_tiles // most)
    arguments["num_tiles"], arguments["tiles_per_block"] = num_tiles, per_block
    return Launch(kernel, (-(-num_tiles // per_block), 1), THREADS, 0)


def _source(name: str) -> str:
    return (resources.files(__package__) / f"{name}.cu").read_text("utf-8")


def _combination(key: SumsKey, result: DType) -> str:
    types = ", ".join(ELEMENTS[dtype] for dtype in (key.gradient, key.total, result))
    return instance(combine_name(key, result), str(THREADS), "CombineArguments", f"combine<{types}>")


def _of_values(dtype: DType) -> dict[str, str]:
    finds = f"find_non_finite<{ELEMENTS[dtype]}>"
    instances = {find_name(dtype): instance(find_name(dtype), str(THREADS), "CheckArguments", finds)}
    for source in ELEMENTS:
        if source != dtype:
            name, template = convert_name(source, dtype), f"convert<{ELEMENTS[source]}, {ELEMENTS[dtype]}>"
            instances[name] = instance(name, str(THREADS), "CheckArguments", template)
    return instances


KeyT = TypeVar("KeyT")


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

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._programs: Programs[Key] = Programs(device, program, KEYS)

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
        return num_gradients > MAX_SOURCES

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
        most = MAX_SOURCES
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

    def copy(self, sources: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Copies arrays; returns False, as it looks at no values."""
        self.scale(sources, 1.0, outs)
        return False

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite.

        Raises:
            MemoryError: There is not enough memory.
        """
        found = []
        for dtype, indices in _grouped([(index, array.dtype) for index, array in enumerate(arrays) if array.size]):
            rows = [(arrays[index].size, 0, self._device.address(arrays[index])) for index in indices]
            place = self._check(ValuesKey(dtype), find_name(dtype), rows, tile_size(dtype))
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
        name, tile = convert_name(array.dtype, dtype), tile_size(array.dtype, dtype)
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
        arguments = np.zeros((), COMBINE)
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
        name, tile = combine_name(key, result), tile_size(key.gradient, key.total)
        try:
            self._launch(key, name, arguments, words, tile)
        except MemoryError:  # for the table of many rows
            few = most_inline(words)
            for first in range(0, len(words), few):
                self._launch(key, name, arguments, words[first : first + few], tile)

    def _check(self, key: ValuesKey, kernel: str, rows: Sequence[Sequence[int]], tile: int) -> Place | None:
        """Runs a kernel that looks for elements; returns the place of the first one that it has found."""
        arguments = np.zeros((), CHECK)
        with self._device.computing():
            found = self._device.from_host(np.array([NOTHING], np.uint64))
            arguments["found"] = self._device.address(found)
            self._launch(key, kernel, arguments, rows, tile)
        place = int(self._device.to_host(found)[0])
        if place == NOTHING:
            return None
        return Place(place >> POSITION_BITS, place & ((1 << POSITION_BITS) - 1))

    def _launch(self, key: Key, kernel: str, arguments: NDArray[Any], rows: Sequence[Sequence[int]], tile: int) -> None:
        """Runs a kernel for rows; returns when it is done.

        Raises:
            MemoryError: There is not enough memory for the table of many rows; nothing has changed.
        """
        words, num_tiles = table_of(rows, tile)
        arguments["num_rows"] = len(rows)
        with self._device.computing():  # for the table, which nothing else keeps
            if words.size > INLINE_WORDS:
                table = self._device.from_host(words)
                arguments["table"] = self._device.address(table)
            else:
                arguments["table"] = 0
                arguments["rows"][: words.size] = words.reshape(-1)
            launch = launch_tiles(kernel, arguments, num_tiles, self._device.limits)
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
