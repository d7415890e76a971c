"""Arrays as they are on disk: their bytes, one array after the other, with a checksum of each chunk."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (its dtypes have names from then on)
import numpy as np
import xxhash
from numpy.typing import NDArray

from gradserve_server.state.files.segments import Extent

Array: TypeAlias = NDArray[Any]
Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]

_CHUNK_BYTES = 1 << 20
_MOST = 1 << 62
_CHECKSUM = np.dtype("<u8")


@dataclass(frozen=True)
class StoredArrays:
    """Where some arrays are.

    Attributes:
        specs: The dtype and shape of each.
        extents: Their space.
        checksums: XXH3 (64 bits) of each chunk of each array.
    """

    specs: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
    extents: Sequence[Extent]
    checksums: bytes

    @property
    def num_bytes(self) -> int:
        """Their size, without the ends of blocks."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.specs)

    def row(self) -> tuple[str, str, bytes]:
        """Returns the columns of a `blob`."""
        arrays = [[dtype.name, list(shape)] for dtype, shape in self.specs]
        extents = [[each.segment, each.offset, each.num_bytes] for each in self.extents]
        return json.dumps(arrays), json.dumps(extents), self.checksums

    @classmethod
    def of_row(cls, arrays: str, extents: str, checksums: bytes) -> "StoredArrays":
        """Reads the columns of a `blob`.

        Raises:
            ValueError, TypeError: They are not what `row` returns.
        """
        specs = [(np.dtype(name), tuple(shape)) for name, shape in json.loads(arrays)]
        found = cls(specs, [Extent(*each) for each in json.loads(extents)], checksums)
        sizes = [size for _, shape in specs for size in shape]
        places = [number for each in found.extents for number in (each.segment, each.offset, each.num_bytes)]
        if not all(type(number) is int and 0 <= number < _MOST for number in (*sizes, *places)):
            raise ValueError("expected sizes and places that are not negative")
        if found.num_bytes > sum(each.num_bytes for each in found.extents):
            raise ValueError(f"expected space for {found.num_bytes} bytes, got less")
        return found


def bytes_of(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns the bytes of arrays, without copying those that are contiguous."""
    return [np.ascontiguousarray(each).reshape(-1).view(np.uint8).data for each in arrays]


def checksums_of(pieces: Sequence[memoryview]) -> bytearray:
    """Returns the checksums of arrays, given their bytes."""
    return bytearray().join(map(_checksum, _chunks(pieces)))


def copies_of(pieces: Sequence[memoryview], checksums: bytearray) -> Iterator[memoryview]:
    """Yields a copy of each chunk of arrays, in memory that the next one uses again; appends its checksum."""
    memory = memoryview(bytearray(_CHUNK_BYTES))
    for chunk in _chunks(pieces):
        copy = memory[: len(chunk)]
        copy[:] = chunk
        checksums += _checksum(copy)
        yield copy


def first_damaged(pieces: Sequence[memoryview], checksums: bytes) -> int | None:
    """Returns the first byte of the first chunk whose checksum differs, None if there is none."""
    expected = np.frombuffer(checksums, _CHECKSUM)
    position = -1
    start = 0
    for position, chunk in enumerate(_chunks(pieces)):
        if position >= len(expected) or xxhash.xxh3_64_intdigest(chunk) != expected[position]:
            return start
        start += len(chunk)
    return None if position + 1 == len(expected) else start


def _checksum(chunk: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(chunk).to_bytes(_CHECKSUM.itemsize, "little")


def _chunks(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK_BYTES):
            yield piece[start : start + _CHUNK_BYTES]
