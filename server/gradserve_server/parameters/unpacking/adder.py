"""Adds packed updates to sums, block by block, on all cores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradserve_protocol.codecs import CODECS, Codec
from gradserve_protocol.codecs.blocks import Nibbles
from gradserve_server.accumulators.gradient import Array, Packed
from gradserve_server.devices.host.kernels import (
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    is_fit,
)


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernel for one dtype of sums; see `loops`."""

    add: Kernel


PACKED_SUMS = KernelTable(
    what="sums of packed updates",
    package=__package__,
    kernels=Kernels,
    types={np.dtype(dtype): {"S": np.dtype(dtype).name} for dtype in (np.float32, np.float64)},
    declared={
        "add": Declared(
            "loops.add",
            "int64[2], int64, int64, {S}, const float32[], {S}[], const uint8[], const int8[], const float32[], "
            "const int16[], const uint16[]",
        )
    },
    contract=False,
)

_CHUNK_ELEMENTS = 1 << 17
"""The values that a thread adds at a time, a multiple of all blocks."""
_LIKE = tuple(np.empty(0, dtype) for dtype in (np.uint8, np.int8, np.float32, np.int16, np.uint16))
for _each in _LIKE:
    _each.flags.writeable = False
_NO_PARTS = np.zeros(16, np.float32)
_PARTS = {codec.name: codec.parts if isinstance(codec, Nibbles) else _NO_PARTS for codec in CODECS.values()}
for _each in _PARTS.values():
    _each.flags.writeable = False


class Addition(NamedTuple):
    """A packed component, and the sum to which it is added.

    Attributes:
        packed: The component, which was checked.
        total: The sum, C-contiguous, in the dtype of the component's master.
        is_first: Whether the sum is empty: it becomes the scaled component.
    """

    packed: Packed
    total: Array
    is_first: bool


class PackedAdder:
    """Adds packed components to sums on all cores. Safe to use from several threads.

    The bits are those of unpacking a component and adding it with a `Reducer`. Kernels unpack and add in one pass.
    NumPy does so, in pieces that stay in the cache, until they are prepared.
    """

    def __init__(self, parallel: ForkJoin, *, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        """Shares sums among the threads of `parallel`, each of which adds `chunk_elements` at a time."""
        self._parallel = parallel
        self._chunk_elements = chunk_elements
        self._kernels = PreparedKernels(PACKED_SUMS, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles the kernels, or loads them from a cache; ends early, between two kernels, once `stop()` is true."""
        self._kernels.prepare(stop)

    def add(self, additions: Sequence[Addition], factor: float) -> None:
        """Computes total += value factor for each, in the dtype of the total; without the total if that is empty."""
        alike: dict[tuple[Codec, np.dtype[Any], bool], list[Addition]] = {}
        for each in additions:
            if each.total.size:
                alike.setdefault((each.packed.codec, each.total.dtype, each.is_first), []).append(each)
        for (codec, dtype, is_first), group in alike.items():
            kernels = self._kernels.get(dtype)
            if kernels is not None and all(is_fit(each.total) for each in group):
                self._add_compiled(kernels, codec, dtype, group, factor, is_first=is_first)
            else:
                self._parallel.run_all([partial(_add_by_numpy, each, factor) for each in group])

    def _add_compiled(
        self,
        kernels: Kernels,
        codec: Codec,
        dtype: np.dtype[Any],
        group: Sequence[Addition],
        factor: float,
        *,
        is_first: bool,
    ) -> None:
        spans: list[tuple[int, int, int]] = []
        for each in group:
            size, data, total = each.total.size, each.packed.data.ctypes.data, each.total.ctypes.data
            for begin in range(0, size, self._chunk_elements):
                count = min(self._chunk_elements, size - begin)
                start = data + begin // codec.block_size * codec.block_bytes
                spans.append((count, start, total + begin * dtype.itemsize))
        arguments = (
            np.array(spans, np.int64),
            codec.number,
            int(is_first),
            dtype.type(factor),
            _PARTS[codec.name],
            np.empty(0, dtype),
            *_LIKE,
        )
        kernels.run(self._parallel, kernels.add, arguments, len(spans))


def _add_by_numpy(addition: Addition, factor: float) -> None:
    packed, total = addition.packed, addition.total.reshape(-1)
    with np.errstate(all="ignore"):  # which is set per thread
        for begin, values in packed.codec.pieces(packed.data, total.size):
            piece = total[begin : begin + values.size]
            scaled = np.multiply(values, total.dtype.type(factor), dtype=total.dtype)
            if addition.is_first:
                piece[:] = scaled
            else:
                piece += scaled
