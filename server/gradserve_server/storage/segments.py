"""Arrays on disk: in a few large files, whose space is used again and again, with checksums.

Appending to a fresh file makes the file system allocate blocks at every flush, which takes several times as long as
overwriting existing blocks.
"""

import bisect
import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (its dtypes have names from then on)
import numpy as np
import xxhash
from numpy.typing import NDArray

from gradserve_server.storage.directory import (
    DamagedError,
    StateError,
    flush_folder,
    keep_private,
    make_folder,
    remove_file,
)

SEGMENT_BYTES = 64 << 20
"""The size of new segments."""
_BLOCK_BYTES = 4096
"""Extents are whole blocks, so that no write touches what another one has written."""
_OTHERS = ("commits", ".commits")
"""The other files in the folder of the segments; see `CommitFile`."""
_IO_BYTES = 8 << 20
"""The most bytes of one system call."""


def remove_segments(folder: Path) -> None:
    """Removes all that a server has left in a folder of segments."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.suffix == ".segment" or path.name in _OTHERS:
            remove_file(path)


@contextmanager
def kept_from_reuse(folder: Path) -> Iterator[None]:
    """Keeps all that is in segments as it is, during the block, for a reader beside the server that writes them.

    What the server removes meanwhile stays where it is; the server never waits. A shared lock on the folder says that
    there is a reader, so it ends with the reader's process, too.

    Raises:
        OSError: The folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # a server holds the lock for a moment only
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a segment.

    Attributes:
        segment: The number of the segment.
        offset: Its first byte there.
        num_bytes: Its size.
    """

    segment: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.num_bytes


def whole_blocks(num_bytes: int) -> int:
    """Returns the space that so many bytes take up."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _usable(num_bytes: int) -> int:
    """Returns how much of a file is whole blocks: all of it, unless it was cut off."""
    return num_bytes // _BLOCK_BYTES * _BLOCK_BYTES


class Segments:
    """The segments of a state directory. One thread uses them at a time; any may call `allocate_free`."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, *, only_read: bool = False) -> None:
        """Opens the segments that exist, all of whose space is free until `occupy`.

        Args:
            folder: The folder, which is made if it does not exist. It has the number of the newest commit, too.
            segment_bytes: The size of new segments.
            only_read: Whether they are opened for reading alone, and left as they are.

        Raises:
            StateError: The folder has a file that is no segment.
            OSError: A segment cannot be opened.
        """
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._descriptors: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._free: dict[int, list[Extent]] = {}
        """By segment, in the order of their offsets, without neighbours."""
        self._change_free = threading.Lock()
        self._retired: list[Extent] = []
        """The space of values that were removed while somebody read beside the server."""
        self._unflushed: set[int] = set()
        self._only_read = only_read
        if not only_read:
            make_folder(folder)
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for path in sorted(folder.iterdir()):
            if path.name in _OTHERS:
                continue
            if path.suffix != ".segment" or not path.stem.isdecimal():
                raise StateError(f"{path}: expected nothing but segments in this folder")
            self._open(int(path.stem))

    def close(self) -> None:
        """Closes the files."""
        for descriptor in (*self._descriptors.values(), self._lock):
            os.close(descriptor)
        self._descriptors.clear()

    def path(self, segment: int) -> Path:
        """Returns the file of a segment."""
        return self._folder / f"{segment:06}.segment"

    @property
    def num_bytes(self) -> int:
        """The size of all segments."""
        return sum(self._sizes.values())

    @property
    def num_free(self) -> int:
        """The space that is free."""
        with self._change_free:
            return self._count_free()

    def _count_free(self) -> int:
        return sum(each.num_bytes for free in self._free.values() for each in free)

    def occupy(self, blobs: Mapping[int, Sequence[Extent]]) -> dict[int, str]:
        """Notes what is in use, once, before anything is allocated.

        Args:
            blobs: The space of each blob, by its number.

        Returns:
            The blobs that cannot be there, each with the reason: their segment is missing or too short, or another blob
            is in the same place. Their space is not noted.
        """
        faults: dict[int, str] = {}
        by_segment: dict[int, list[tuple[Extent, int]]] = {}
        for number, extents in blobs.items():
            for each in extents:
                if each.segment not in self._sizes:
                    faults[number] = f"{self.path(each.segment)}: the file is missing"
                elif each.offset + whole_blocks(each.num_bytes) > self._sizes[each.segment]:
                    end, size = each.offset + whole_blocks(each.num_bytes), self._sizes[each.segment]
                    faults[number] = f"{self.path(each.segment)}: expected {end} bytes or more, got {size}"
                else:
                    by_segment.setdefault(each.segment, []).append((each, number))
        for segment, used in by_segment.items():
            free, start = [], 0
            for each, number in sorted(used, key=lambda pair: pair[0].offset):
                if number in faults:
                    continue
                if each.offset < start:
                    faults[number] = f"{self.path(segment)}: two values are in the same place, at {each.offset}"
                    continue
                free.append(Extent(segment, start, each.offset - start))
                start = each.offset + whole_blocks(each.num_bytes)
            free.append(Extent(segment, start, _usable(self._sizes[segment]) - start))
            self._free[segment] = [each for each in free if each.num_bytes]
        if not self._is_unread():  # a reader may have come before what is free now was removed
            self._retired = [each for free in self._free.values() for each in free]
            self._free = {segment: [] for segment in self._free}
        return faults

    def allocate(self, num_bytes: int) -> list[Extent]:
        """Returns free space; makes segments if there is not enough.

        Raises:
            OSError: The disk is full; nothing has changed.
        """
        while (found := self.allocate_free(num_bytes)) is None:
            if not self._reuse_retired():
                self._make_segment()
        return found

    def allocate_free(self, num_bytes: int) -> list[Extent] | None:
        """Returns free space; None if there is not enough."""
        left = whole_blocks(num_bytes)
        with self._change_free:
            if self._count_free() < left:
                return None
            found = []
            for free in self._free.values():
                while free and left:
                    first = free.pop(0)
                    taken = Extent(first.segment, first.offset, min(first.num_bytes, left))
                    if taken.num_bytes < first.num_bytes:
                        free.insert(0, Extent(first.segment, taken.end, first.num_bytes - taken.num_bytes))
                    found.append(taken)
                    left -= taken.num_bytes
            return found

    def release(self, extents: Iterable[Extent]) -> None:
        """Gives space back."""
        with self._change_free:
            for each in extents:
                start, end = each.offset, each.offset + whole_blocks(each.num_bytes)
                free = self._free[each.segment]
                index = bisect.bisect(free, start, key=lambda other: other.offset)
                if index < len(free) and free[index].offset == end:
                    end = free.pop(index).end
                if index and free[index - 1].end == start:
                    index -= 1
                    start = free.pop(index).offset
                free.insert(index, Extent(each.segment, start, end - start))

    def retire(self, extents: Iterable[Extent]) -> None:
        """Gives the space of removed values back: at once, or when nobody reads beside the server any more.

        The database must not refer to it any more, so that readers who come later do not need it.
        """
        self._retired += extents
        self._reuse_retired()

    def _reuse_retired(self) -> bool:
        """Gives back what was retired unless somebody still reads; returns True if there is more free space then."""
        if not self._retired or not self._is_unread():
            return False
        retired, self._retired = self._retired, []
        self.release(retired)
        return True

    def _is_unread(self) -> bool:
        """Returns True if nobody reads beside the server; see `kept_from_reuse`."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return True

    def write(self, extents: Sequence[Extent], pieces: Iterable[memoryview]) -> None:
        """Writes bytes into space that is large enough. They are durable after the next `flush`.

        Raises:
            OSError: They cannot be written.
        """
        places = iter(extents)
        place = next(places, None)
        for piece in pieces:
            rest = piece
            while rest:
                assert place is not None, "the space is large enough"
                part = rest[: min(place.num_bytes, _IO_BYTES)]
                count = os.pwrite(self._descriptors[place.segment], part, place.offset)
                # Linux begins to write to the disk at once, while the next bytes are copied: the flush takes less then.
                os.posix_fadvise(self._descriptors[place.segment], place.offset, count, os.POSIX_FADV_DONTNEED)
                self._unflushed.add(place.segment)
                rest = rest[count:]
                place = Extent(place.segment, place.offset + count, place.num_bytes - count)
                if not place.num_bytes:
                    place = next(places, None)

    def flush(self) -> None:
        """Makes everything written so far survive a loss of power.

        Raises:
            OSError: It may not survive. What is on disk is then unknown.
        """
        while self._unflushed:
            segment = next(iter(self._unflushed))
            os.fdatasync(self._descriptors[segment])
            self._unflushed.remove(segment)

    def read(self, extents: Sequence[Extent], memory: memoryview) -> None:
        """Fills memory from some space.

        Raises:
            StateError: A segment ends too early.
            OSError: It cannot be read.
        """
        for each in extents:
            offset, left = each.offset, min(each.num_bytes, len(memory))
            while left:
                count = os.preadv(self._descriptors[each.segment], [memory[: min(left, _IO_BYTES)]], offset)
                if not count:
                    raise StateError(f"{self.path(each.segment)}: the file ends at {offset}, within a value")
                memory, offset, left = memory[count:], offset + count, left - count

    def _make_segment(self) -> None:
        number = max(self._sizes, default=0) + 1
        path = self.path(number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
            os.fsync(descriptor)
            flush_folder(self._folder)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._open(number)

    def _open(self, number: int) -> None:
        if not self._only_read:
            keep_private(self.path(number))
        access = os.O_RDONLY if self._only_read else os.O_RDWR
        descriptor = os.open(self.path(number), access | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(descriptor).st_size
        self._descriptors[number], self._sizes[number] = descriptor, size
        with self._change_free:
            self._free[number] = [Extent(number, 0, _usable(size))] if _usable(size) else []


Array: TypeAlias = NDArray[Any]
Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]

_CHUNK_BYTES = 1 << 20
_MOST = 1 << 62
_CHECKSUM = np.dtype("<u8")


@dataclass(frozen=True)
class StoredArrays:
    """Describes arrays that are on disk.

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


def checked_chunks(segments: Segments, stored: StoredArrays) -> Iterator[memoryview]:
    """Yields each chunk of arrays, in memory that the next one uses again, once its checksum was compared.

    Raises:
        DamagedError: A chunk is damaged, or its segment cannot be read.
    """
    memory = memoryview(bytearray(_CHUNK_BYTES))
    left = list(reversed(stored.extents))
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in stored.specs]
    chunks = [min(_CHUNK_BYTES, size - start) for size in sizes for start in range(0, size, _CHUNK_BYTES)]
    for number, size in enumerate(chunks):
        chunk, rest = memory[:size], memory[:size]
        place = left[-1]
        while rest:
            first = left.pop()
            count = min(first.num_bytes, len(rest))
            try:
                segments.read([Extent(first.segment, first.offset, count)], rest[:count])
            except (OSError, KeyError) as error:
                raise DamagedError(f"{segments.path(first.segment)}: a value cannot be read: {error}") from error
            if count < first.num_bytes:
                left.append(Extent(first.segment, first.offset + count, first.num_bytes - count))
            rest = rest[count:]
        expected = stored.checksums[number * _CHECKSUM.itemsize : (number + 1) * _CHECKSUM.itemsize]
        if _checksum(chunk) != expected:
            raise DamagedError(
                f"{segments.path(place.segment)}: the values at {place.offset} are damaged: their checksum differs"
            )
        yield chunk


def _checksum(chunk: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(chunk).to_bytes(_CHECKSUM.itemsize, "little")


def _chunks(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK_BYTES):
            yield piece[start : start + _CHUNK_BYTES]
