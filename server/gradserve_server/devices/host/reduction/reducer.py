"""Element-wise arithmetic on lists of arrays."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.kernel_table import ELEMENTS, PreparedKernels
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.host.reduction import operations
from gradserve_server.devices.host.reduction.chunks import Span, addresses, cut
from gradserve_server.devices.host.reduction.finite import Place, first_non_finite, search
from gradserve_server.devices.host.reduction.kernels import REDUCTION, Kernels
from gradserve_server.devices.host.reduction.operations import Operation

Array: TypeAlias = NDArray[Any]

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
        self._kernels = PreparedKernels(REDUCTION)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()` is true."""
        self._kernels.prepare(stop)

    def scale(self, sources: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
        """Computes out = source factor for each, in the dtype of `out`.

        Args:
            sources: The arrays to scale.
            factor: The factor.
            outs: The results; each is either its `source` itself or other memory.
        """
        pairs = list(zip(sources, outs, strict=True))
        self._compute(operations.SCALE, (factor,), [pair for pair in pairs if pair[0] is not pair[1]])
        if factor != 1.0:
            self._compute(operations.SCALE_IN_PLACE, (factor,), [(out,) for source, out in pairs if source is out])

    def add_scaled(self, totals: Sequence[Array], sources: Sequence[Array], factor: float) -> None:
        """Computes total += source factor for each, in the dtype of `total`."""
        self._compute(operations.ADD_SCALED, (factor,), list(zip(totals, sources, strict=True)))

    def divide(self, totals: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        """Computes out = total / divisor for each, in the dtype of `total`, then rounded to that of `out`.

        Args:
            totals: The dividends.
            divisor: The divisor.
            outs: The results; each is either its `total` itself or other memory.
        """
        pairs = list(zip(totals, outs, strict=True))
        self._compute(operations.DIVIDE, (divisor,), [pair for pair in pairs if pair[0] is not pair[1]])
        if divisor != 1.0:
            self._compute(operations.DIVIDE_IN_PLACE, (divisor,), [(total,) for total, out in pairs if total is out])

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
        self._compute(operations.ADD_AND_DIVIDE, numbers, [row for row in rows if row[0] is not row[2]])
        self._compute(operations.ADD_AND_DIVIDE_IN_PLACE, numbers, [row[:2] for row in rows if row[0] is row[2]])

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

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite."""
        is_large = sum([array.nbytes for array in arrays]) >= self._shared_bytes
        small = self._chunk_elements // _SMALL_PARTS
        shared: dict[np.dtype[Any], list[tuple[int, Array]]] = {}
        found: list[Place] = []
        for index, array in enumerate(arrays):
            if is_large and array.size > small and _fits(array) and self._kernels.get(array.dtype) is not None:
                shared.setdefault(array.dtype, []).append((index, array))
            elif (position := first_non_finite(array)) is not None:
                found.append(Place(index, position))
                break
        for dtype, alike in shared.items():
            kernels = self._kernels.get(dtype)
            assert kernels is not None, "they were there before"
            place = search(kernels, self._parallel, [array for _, array in alike], self._chunk_elements)
            if place is not None:
                found.append(Place(alike[place.array][0], place.position))
        return min(found, default=None)

    def _compute(self, operation: Operation, numbers: Sequence[float], rows: Sequence[Row]) -> None:
        if not rows:
            return
        if not self._is_large(operation, numbers, rows):
            _one_by_one(operation, numbers, rows)
            return
        small = self._chunk_elements // _SMALL_PARTS
        _one_by_one(operation, numbers, [row for row in rows if row[0].size <= small])
        for alike in _alike(row for row in rows if row[0].size > small):
            self._share(operation, numbers, alike)

    def _is_large(self, operation: Operation, numbers: Sequence[float], rows: Sequence[Row]) -> bool:
        num_bytes = sum([row[operation.total].nbytes for row in rows])
        if num_bytes < self._shared_bytes:
            return False
        is_easy = operation.is_easy(*numbers) and all(row[0].dtype == row[-1].dtype for row in rows)
        return not is_easy or num_bytes >= self._shared_bytes * _EASY

    def _share(self, operation: Operation, numbers: Sequence[float], rows: Sequence[Row]) -> None:
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

    def _kernels_for(self, operation: Operation, rows: Sequence[Row]) -> Kernels | None:
        gradient, total = rows[0][operation.gradient], rows[0][operation.total]
        kernels = self._kernels.get(gradient.dtype)
        if kernels is None or total.dtype != REDUCTION.types[gradient.dtype]["S"]:
            return None
        # Inline gradients lie anywhere in their message.
        return kernels if all(_fits(array) for row in rows for array in row) else None


def _fits(array: Array) -> bool:
    return array.flags.aligned and array.flags.c_contiguous


def _alike(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Groups rows by the dtypes of their arrays."""
    groups: dict[tuple[np.dtype[Any], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(array.dtype for array in row), []).append(row)
    return groups.values()


def _one_by_one(operation: Operation, numbers: Sequence[float], rows: Iterable[Row]) -> None:
    with np.errstate(all="ignore"):
        for row in rows:
            operation.by_numpy(*numbers, *row)


def _by_numpy(
    function: Callable[..., None], numbers: Sequence[float], rows: Sequence[Row], spans: Iterable[Span]
) -> None:
    with np.errstate(all="ignore"):  # which is set per thread
        for which, begin, end in spans:
            function(*numbers, *(array.reshape(-1)[begin:end] for array in rows[which]))
