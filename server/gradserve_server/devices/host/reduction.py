"""Element-wise sums, products and quotients of lists of arrays, on all cores, and the search for values not finite.

G is the dtype of gradients, S the dtype of their sums; `intrinsics` says how kernels take elements of G. Lists are cut
into chunks of about equal size, whatever the sizes of the arrays, and all threads share the chunks.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Place
from gradserve_server.devices.host.kernels import (
    ELEMENTS,
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    is_fit,
)


class Span(NamedTuple):
    """Elements of one array of a list.

    Attributes:
        array: The index of the array.
        begin: The first element.
        end: The element after the last.
    """

    array: int
    begin: int
    end: int


def cut(sizes: Iterable[int], chunk_size: int) -> list[list[Span]]:
    """Cuts arrays of the given sizes into chunks.

    Args:
        sizes: The number of elements of each array.
        chunk_size: The number of elements of every chunk but the last.

    Returns:
        The spans of each chunk, in order. None is empty.
    """
    chunks: list[list[Span]] = []
    room = 0
    for array, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if room == 0:
                chunks.append([])
                room = chunk_size
            end = min(begin + room, size)
            chunks[-1].append(Span(array, begin, end))
            room -= end - begin
            begin = end
    return chunks


def addresses(
    rows: Sequence[tuple[NDArray[Any], ...]], chunks: Sequence[Sequence[Span]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the spans for kernels, and the first one of each chunk; see `reduction_loops`.

    Without NumPy, whose calls take longer than the few numbers that there mostly are.
    """
    places = [[array.ctypes.data for array in row] for row in rows]
    sizes = [[array.itemsize for array in row] for row in rows]
    spans: list[list[int]] = []
    firsts = [0]
    for chunk in chunks:
        for which, begin, end in chunk:
            spans.append([end - begin, *map(operator.add, places[which], [begin * size for size in sizes[which]])])
        firsts.append(len(spans))
    return np.array(spans, np.int64), np.array(firsts, np.int64)


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for one G; see the functions of `reduction_loops`."""

    scale: Kernel
    add_scaled: Kernel
    divide: Kernel
    divide_in_place: Kernel
    add_and_divide: Kernel
    add_and_divide_in_place: Kernel
    find_non_finite: Kernel
    copy: Kernel


_SUMS = {np.float32: "float32", ml_dtypes.bfloat16: "float32", np.float16: "float32", np.float64: "float64"}

REDUCTION = KernelTable(
    what="sums of gradients",
    package=__package__,
    kernels=Kernels,
    types={np.dtype(dtype): {"G": ELEMENTS[np.dtype(dtype)], "S": name} for dtype, name in _SUMS.items()},
    declared={
        "scale": Declared("reduction_loops.scale", "int64[2], int64[], {S}, const {G}[], {S}[]"),
        "add_scaled": Declared("reduction_loops.add_scaled", "int64[2], int64[], {S}, {S}[], const {G}[]"),
        "divide": Declared("reduction_loops.divide", "int64[2], int64[], {S}, const {S}[], {G}[]"),
        "divide_in_place": Declared("reduction_loops.divide_in_place", "int64[2], int64[], {S}, {S}[]"),
        "add_and_divide": Declared(
            "reduction_loops.add_and_divide", "int64[2], int64[], {S}, {S}, const {S}[], const {G}[], {G}[]"
        ),
        "add_and_divide_in_place": Declared(
            "reduction_loops.add_and_divide_in_place", "int64[2], int64[], {S}, {S}, {S}[], const {G}[]"
        ),
        "find_non_finite": Declared("reduction_loops.find_non_finite", "int64[2], int64[], {S}, const {G}[], int64[2]"),
        "copy": Declared("reduction_loops.copy", "int64[2], int64[], {S}, const {G}[], {G}[], int64[]"),
    },
    contract=False,
)


BLOCK = 1 << 15
"""Elements checked at a time, so that the scratch memory stays in the cache."""

_EXPONENTS = {
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}
"""The exponent's bits, which are all set only in infinities and NaN. For the 16-bit types, because their isfinite takes
ten times as long."""


def first_non_finite(values: NDArray[Any]) -> int | None:
    """Returns the position of the first value that is infinite or NaN, None if all are finite.

    Takes about as long as adding the values to others.
    """
    flat = values.reshape(-1)
    exponent = _EXPONENTS.get(values.dtype)
    scratch = np.empty(min(BLOCK, flat.size), bool if exponent is None else np.uint16)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        marks = scratch[: block.size]
        if exponent is None:
            is_finite = np.isfinite(block, out=marks).all()
        else:
            is_finite = np.bitwise_and(block.view(np.uint16), exponent, out=marks).max() != exponent
        if not is_finite:
            return start + int(np.argmin(np.isfinite(block)))
    return None


def _search(kernels: Kernels, parallel: ForkJoin, arrays: Sequence[NDArray[Any]], chunk_elements: int) -> Place | None:
    """Does the same for a list of arrays, on all threads. The result does not depend on the number of threads.

    Args:
        kernels: The kernels for the dtype of the arrays.
        parallel: The threads.
        arrays: The arrays, aligned and C-contiguous.
        chunk_elements: The number of elements that a thread looks at before it takes others.
    """
    dtype = arrays[0].dtype
    chunks = cut([array.size for array in arrays], chunk_elements)
    spans, firsts = addresses([(array,) for array in arrays], chunks)
    found = np.full((len(chunks), 2), -1, np.int64)
    arguments = (spans, firsts, _largest(dtype), np.empty(0, ELEMENTS[dtype]), found)
    kernels.run(parallel, kernels.find_non_finite, arguments, len(chunks))
    for chunk, first, (span, position) in zip(chunks, firsts, found, strict=False):
        if span >= 0:
            which, begin, _ = chunk[span - first]
            return Place(which, begin + int(position))
    return None


def _largest(dtype: np.dtype[Any]) -> Any:
    """Returns the largest finite number of a dtype, in the dtype of sums."""
    return np.dtype(REDUCTION.types[dtype]["S"]).type(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


Array: TypeAlias = NDArray[Any]

_SCRATCH_ELEMENTS = 1 << 18
"""The elements whose intermediate results are kept: a megabyte, which stays in the last cache."""


def _numpy_scale(factor: float, source: Array, out: Array) -> None:
    """Computes out = source factor, in the dtype of `out`."""
    if factor == 1.0:
        np.copyto(out, source)
    else:
        np.multiply(source, out.dtype.type(factor), out=out, dtype=out.dtype)


def _numpy_scale_in_place(factor: float, source: Array) -> None:
    """Computes source *= factor."""
    np.multiply(source, source.dtype.type(factor), out=source)


def _numpy_add_scaled(factor: float, total: Array, source: Array) -> None:
    """Computes total += source factor, in the dtype of `total`."""
    if factor == 1.0:
        np.add(total, source, out=total)
        return
    if total.size <= _SCRATCH_ELEMENTS:
        np.add(total, np.multiply(source, total.dtype.type(factor), dtype=total.dtype), out=total)
        return
    for block, scratch in _blocks(total):
        np.multiply(source[block], total.dtype.type(factor), out=scratch, dtype=total.dtype)
        np.add(total[block], scratch, out=total[block])


def _numpy_divide_in_place(divisor: float, total: Array) -> None:
    """Computes total /= divisor."""
    if divisor != 1.0:
        np.divide(total, total.dtype.type(divisor), out=total)


def _numpy_divide(divisor: float, total: Array, out: Array) -> None:
    """Computes out = total / divisor, in the dtype of `total`, then rounded to that of `out`."""
    if out.dtype == total.dtype:
        np.divide(total, total.dtype.type(divisor), out=out)
        return
    if total.size <= _SCRATCH_ELEMENTS:
        np.copyto(out, np.divide(total, total.dtype.type(divisor)), casting="unsafe")
        return
    for block, scratch in _blocks(total):
        np.divide(total[block], total.dtype.type(divisor), out=scratch)
        np.copyto(out[block], scratch, casting="unsafe")


def _numpy_add_and_divide_in_place(factor: float, divisor: float, total: Array, source: Array) -> None:
    """Computes total = (total + source factor) / divisor, in the dtype of `total`."""
    _numpy_add_scaled(factor, total, source)
    _numpy_divide_in_place(divisor, total)


def _numpy_add_and_divide(factor: float, divisor: float, total: Array, source: Array, out: Array) -> None:
    """Computes out = (total + source factor) / divisor, in the dtype of `total`, then rounded to that of `out`.

    Changes `total`.
    """
    _numpy_add_scaled(factor, total, source)
    _numpy_divide(divisor, total, out)


def _blocks(total: Array) -> Iterator[tuple[slice, Array]]:
    scratch = np.empty(min(_SCRATCH_ELEMENTS, total.size), total.dtype)
    for start in range(0, total.size, _SCRATCH_ELEMENTS):
        block = slice(start, min(start + _SCRATCH_ELEMENTS, total.size))
        yield block, scratch[: block.stop - start]


@dataclass(frozen=True)
class _Operation:
    """An operation on rows.

    Attributes:
        by_numpy: Computes it, given numbers and the arrays of a row.
        kernel: Returns its kernel, None if it has none.
        gradient: The index in a row of an array in the dtype of gradients.
        total: The index in a row of an array in the dtype of sums.
        is_easy: Returns True if NumPy computes it in one pass over arrays of one dtype, given the numbers.
    """

    by_numpy: Callable[..., None]
    kernel: Callable[[Kernels], Kernel | None]
    gradient: int
    total: int
    is_easy: Callable[..., bool] = lambda *numbers: True


_SCALE = _Operation(_numpy_scale, lambda kernels: kernels.scale, gradient=0, total=1)
_SCALE_IN_PLACE = _Operation(_numpy_scale_in_place, lambda kernels: None, gradient=0, total=0)
_ADD_SCALED = _Operation(
    _numpy_add_scaled,
    lambda kernels: kernels.add_scaled,
    gradient=1,
    total=0,
    is_easy=lambda factor: factor == 1.0,
)
_DIVIDE = _Operation(_numpy_divide, lambda kernels: kernels.divide, gradient=1, total=0)
_DIVIDE_IN_PLACE = _Operation(_numpy_divide_in_place, lambda kernels: kernels.divide_in_place, gradient=0, total=0)
_ADD_AND_DIVIDE = _Operation(
    _numpy_add_and_divide,
    lambda kernels: kernels.add_and_divide,
    gradient=1,
    total=0,
    is_easy=lambda factor, divisor: False,
)
_ADD_AND_DIVIDE_IN_PLACE = _Operation(
    _numpy_add_and_divide_in_place,
    lambda kernels: kernels.add_and_divide_in_place,
    gradient=1,
    total=0,
    is_easy=lambda factor, divisor: False,
)


Row: TypeAlias = tuple[Array, ...]
"""The arrays of one computation, all of one shape."""

_SHARED_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 17

_EASY = 8
"""The size, in units of `shared_bytes`, from which on threads share what NumPy computes in one pass over memory. To
begin with kernels and threads takes as long as such a pass over a few megabytes."""

_SMALL_PARTS = 32
"""NumPy computes arrays of less than this part of a chunk sooner than a kernel learns where they are."""

_NUMPY_CHUNKS = 8
"""The chunks that NumPy computes at once: threads that often give and take the GIL slow each other down."""


class Reducer:
    """Scales, adds and divides lists of C-contiguous arrays on all cores. Safe to use from several threads.

    Kernels compute whatever is large. NumPy computes the rest, everything until the kernels are prepared, and dtypes
    for which there are none. Every operation on every element is rounded by itself, so the results depend neither on
    that nor on the number of threads; only the bits of a NaN may.
    """

    def __init__(
        self, parallel: ForkJoin, *, shared_bytes: int = _SHARED_BYTES, chunk_elements: int = _CHUNK_ELEMENTS
    ) -> None:
        """Takes the threads.

        Args:
            parallel: The threads that share large computations.
            shared_bytes: The least size of a list of arrays that is large: less takes a tenth of a millisecond.
            chunk_elements: The number of elements that a thread computes at a time with a kernel.
        """
        self._parallel = parallel
        self._shared_bytes = shared_bytes
        self._chunk_elements = chunk_elements
        self._kernels = PreparedKernels(REDUCTION, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()` is true."""
        self._kernels.prepare(stop)

    def want(self, dtype: np.dtype[Any]) -> None:
        """Asks for the kernels of gradients of a dtype before there are any."""
        self._kernels.want(dtype)

    def scale(self, sources: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
        """Computes out = source factor for each, in the dtype of `out`.

        Args:
            sources: The arrays to scale.
            factor: The factor.
            outs: The results; each is either its `source` itself or other memory.
        """
        pairs = list(zip(sources, outs, strict=True))
        self._compute(_SCALE, (factor,), [pair for pair in pairs if pair[0] is not pair[1]])
        if factor != 1.0:
            self._compute(_SCALE_IN_PLACE, (factor,), [(out,) for source, out in pairs if source is out])

    def add_scaled(self, totals: Sequence[Array], sources: Sequence[Array], factor: float) -> None:
        """Computes total += source factor for each, in the dtype of `total`."""
        self._compute(_ADD_SCALED, (factor,), list(zip(totals, sources, strict=True)))

    def divide(self, totals: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        """Computes out = total / divisor for each, in the dtype of `total`, then rounded to that of `out`.

        Args:
            totals: The dividends.
            divisor: The divisor.
            outs: The results; each is either its `total` itself or other memory.
        """
        pairs = list(zip(totals, outs, strict=True))
        self._compute(_DIVIDE, (divisor,), [pair for pair in pairs if pair[0] is not pair[1]])
        if divisor != 1.0:
            self._compute(_DIVIDE_IN_PLACE, (divisor,), [(total,) for total, out in pairs if total is out])

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
            totals: The sums. They may be changed.
            sources: What is added.
            factor: The factor of the sources.
            divisor: The divisor.
            outs: The results; each is either its `total` itself or other memory.
        """
        rows = list(zip(totals, sources, outs, strict=True))
        numbers = (factor, divisor)
        self._compute(_ADD_AND_DIVIDE, numbers, [row for row in rows if row[0] is not row[2]])
        self._compute(_ADD_AND_DIVIDE_IN_PLACE, numbers, [row[:2] for row in rows if row[0] is row[2]])

    def needs_totals(self, num_gradients: int) -> bool:
        """Returns True: sums are in memory between two additions."""
        return True

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

        Args:
            gradients: The lists of arrays to add, at least one.
            factors: The factor of each list.
            divisor: The divisor.
            dtypes: The dtypes of the sums.
            totals: Memory for the sums.
            outs: The results; each is either its `total` itself or other memory.
        """
        assert totals is not None, "see `needs_totals`"
        self.scale(gradients[0], factors[0], totals)
        for gradient, factor in zip(gradients[1:-1], factors[1:-1], strict=True):
            self.add_scaled(totals, gradient, factor)
        if len(gradients) > 1:
            self.add_and_divide(totals, gradients[-1], factors[-1], divisor, outs)
        else:
            self.divide(totals, divisor, outs)

    def make_ready(self, dtypes: Iterable[tuple[np.dtype[Any], np.dtype[Any]]]) -> None:
        """Does nothing: NumPy computes what kernels do not."""

    def copy(self, sources: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Copies arrays in one pass; returns whether all the values that were copied are finite."""
        rows = list(zip(sources, outs, strict=True))
        is_large = sum([source.nbytes for source in sources]) >= self._shared_bytes
        is_finite = True
        shared: list[Row] = []
        for source, out in rows:
            is_shared = (
                is_large and source.size > self._chunk_elements // _SMALL_PARTS and is_fit(source) and is_fit(out)
            )
            if is_shared and self._kernels.get(source.dtype) is not None:
                shared.append((source, out))
            else:
                np.copyto(out, source)
                is_finite = first_non_finite(out) is None and is_finite
        for alike in _alike(shared):
            is_finite = self._copy_shared(alike) and is_finite
        return is_finite

    def _copy_shared(self, rows: Sequence[Row]) -> bool:
        """Copies arrays of one dtype on all threads."""
        dtype = rows[0][0].dtype
        kernels = self._kernels.get(dtype)
        assert kernels is not None, "they were there before"
        chunks = cut([row[0].size for row in rows], self._chunk_elements)
        spans, firsts = addresses(rows, chunks)
        non_finite = np.zeros(len(chunks), np.int64)
        like = np.empty(0, ELEMENTS[dtype])
        kernels.run(self._parallel, kernels.copy, (spans, firsts, _largest(dtype), like, like, non_finite), len(chunks))
        return not non_finite.any()

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite."""
        is_large = sum([array.nbytes for array in arrays]) >= self._shared_bytes
        small = self._chunk_elements // _SMALL_PARTS
        shared: dict[np.dtype[Any], list[tuple[int, Array]]] = {}
        found: list[Place] = []
        for index, array in enumerate(arrays):
            if is_large and array.size > small and is_fit(array) and self._kernels.get(array.dtype) is not None:
                shared.setdefault(array.dtype, []).append((index, array))
            elif (position := first_non_finite(array)) is not None:
                found.append(Place(index, position))
                break
        for dtype, alike in shared.items():
            kernels = self._kernels.get(dtype)
            assert kernels is not None, "they were there before"
            place = _search(kernels, self._parallel, [array for _, array in alike], self._chunk_elements)
            if place is not None:
                found.append(Place(alike[place.array][0], place.position))
        return min(found, default=None)

    def _compute(self, operation: _Operation, numbers: Sequence[float], rows: Sequence[Row]) -> None:
        if not rows:
            return
        if not self._is_large(operation, numbers, rows):
            _one_by_one(operation, numbers, rows)
            return
        small = self._chunk_elements // _SMALL_PARTS
        _one_by_one(operation, numbers, [row for row in rows if row[0].size <= small])
        for alike in _alike(row for row in rows if row[0].size > small):
            self._share(operation, numbers, alike)

    def _is_large(self, operation: _Operation, numbers: Sequence[float], rows: Sequence[Row]) -> bool:
        num_bytes = 0
        for row in rows:
            num_bytes += row[operation.total].nbytes
        if num_bytes < self._shared_bytes:
            return False
        is_easy = operation.is_easy(*numbers) and all(row[0].dtype == row[-1].dtype for row in rows)
        return not is_easy or num_bytes >= self._shared_bytes * _EASY

    def _share(self, operation: _Operation, numbers: Sequence[float], rows: Sequence[Row]) -> None:
        """Computes rows of the same dtypes on all threads."""
        sizes = [row[0].size for row in rows]
        kernels = self._kernels_for(operation, rows)
        kernel = operation.kernel(kernels) if kernels is not None else None
        if kernels is None or kernel is None:
            chunks = cut(sizes, self._chunk_elements * _NUMPY_CHUNKS)
            self._parallel.run_all([partial(_by_numpy, operation.by_numpy, numbers, rows, chunk) for chunk in chunks])
        else:
            chunks = cut(sizes, self._chunk_elements)
            spans, firsts = addresses(rows, chunks)
            dtype = rows[0][operation.total].dtype
            like = [np.empty(0, ELEMENTS[array.dtype]) for array in rows[0]]
            arguments = (spans, firsts, *map(dtype.type, numbers), *like)
            kernels.run(self._parallel, kernel, arguments, len(chunks))

    def _kernels_for(self, operation: _Operation, rows: Sequence[Row]) -> Kernels | None:
        gradient, total = rows[0][operation.gradient], rows[0][operation.total]
        kernels = self._kernels.get(gradient.dtype)
        if kernels is None or total.dtype != REDUCTION.types[gradient.dtype]["S"]:
            return None
        # Inline gradients lie anywhere in their message.
        return kernels if all(is_fit(array) for row in rows for array in row) else None


def _alike(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Groups rows by the dtypes of their arrays."""
    groups: dict[tuple[np.dtype[Any], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(array.dtype for array in row), []).append(row)
    return groups.values()


def _one_by_one(operation: _Operation, numbers: Sequence[float], rows: Iterable[Row]) -> None:
    with np.errstate(all="ignore"):
        for row in rows:
            operation.by_numpy(*numbers, *row)


def _by_numpy(
    function: Callable[..., None], numbers: Sequence[float], rows: Sequence[Row], spans: Iterable[Span]
) -> None:
    with np.errstate(all="ignore"):  # which is set per thread
        for which, begin, end in spans:
            function(*numbers, *(array.reshape(-1)[begin:end] for array in rows[which]))
