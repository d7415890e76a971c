"""Writes changes of the state to disk, many at once, in a thread."""

import asyncio
import contextlib
import errno
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradserve_server.errors import ResourceExhaustedError, ServiceError, UnavailableError
from gradserve_server.storage.database import UNREADABLE, identify, identity_of, open_files
from gradserve_server.storage.directory import DamagedError, StateDirectory, StateError
from gradserve_server.storage.segments import (
    Allocate,
    Array,
    Extent,
    Segments,
    StoredArrays,
    bytes_of,
    checksums_of,
    copies_of,
    first_damaged,
    whole_blocks,
)

_log = logging.getLogger(__name__)

_READ_BYTES = 8 << 20
"""The most bytes read at once."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Space:
    """Space on disk that is set aside for arrays.

    Attributes:
        extents: The space; none once it is used or given back.
    """

    extents: list[Extent]


@dataclass
class _Arrays:
    number: int
    arrays: Sequence[Array]
    space: Space | None
    live: bool


@dataclass
class Change:
    """A change of the state that is written as a whole or not at all."""

    statements: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    arrays: list[_Arrays] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def execute(self, statement: str, *values: Any) -> None:
        """Adds a statement of SQL."""
        self.statements.append((statement, values))

    def put(self, number: int, arrays: Sequence[Array], space: Space | None = None, *, live: bool = False) -> None:
        """Adds arrays.

        Args:
            number: The number of their blob; see `StateStore.new_blob`.
            arrays: The arrays. They should not change until the change is written.
            space: Space for them, if some was set aside. What they do not need is given back.
            live: Whether they can still change, because others have access to their memory: then the checksums are
                right for whatever is written.
        """
        self.arrays.append(_Arrays(number, arrays, space, live))

    def remove(self, numbers: Iterable[int]) -> None:
        """Removes blobs. Whatever refers to them must be deleted by a statement before."""
        self.removed += numbers


@dataclass
class _Entry:
    change: Change
    answer: asyncio.Future[None] | None
    needs_bytes: int | None = None
    space: Space | None = None


class StateStore:
    """The state on disk.

    Changes are carried out in order. Those that come while others are being written share one flush. When a write or a
    flush fails, nobody knows what is on disk: the store then refuses everything, and the server has to stop.

    Attributes:
        on_read: Told how many bytes of arrays were read, at least once in 8 MiB; None for nobody.
        faults: The reasons why a server refuses the files as a whole; see `go_on`.
    """

    def __init__(self, directory: StateDirectory, *, damaged: bool = False) -> None:
        """Takes over a directory, and opens the state in it.

        Args:
            directory: The directory.
            damaged: Whether to open it even if blobs are not where they should be, or files do not belong together,
                to look at the rest or to remove them. Otherwise that is an error.

        Raises:
            LostDatabaseError: The metadata are gone.
            DamagedError: Blobs are not where they should be, or files are missing or older than others.
            StateError: The metadata are damaged, or of a later version.
            OSError: A file cannot be opened.
        """
        self.on_read: Callable[[int], object] | None = None
        self._directory = directory
        with contextlib.ExitStack() as files:
            files.callback(directory.close)
            opened = open_files(directory, damaged=damaged)
            self._database = files.enter_context(contextlib.closing(opened.database))
            files.callback(self._close_commits)
            self._commits = opened.commits
            self.faults = opened.faults
            _, self._newest = identity_of(directory, opened.database)
            self.segments = files.enter_context(contextlib.closing(Segments(directory.segments)))
            self._blobs, self._faults = self._read_blobs()
            self._faults |= self.segments.occupy({number: blob.extents for number, blob in self._blobs.items()})
            if self._faults and not damaged:
                raise DamagedError(next(iter(self._faults.values())))
            for number in self._faults:
                self._blobs.pop(number, None)
            self._files = files.pop_all()
        self._numbers = itertools.count(max(self._blobs, default=0) + 1)
        self._entries: deque[_Entry] = deque()
        self._arrived = threading.Condition()
        self._is_closing = False
        self._failure: ServiceError | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[str], object] = _log.critical

    def go_on(self) -> None:
        """Makes the database as it is the state of the directory, whatever was lost; then changes are possible."""
        if self._commits is None:
            self._commits = identify(self._directory, self._database)
            self.faults = ()

    def start(self, on_failure: Callable[[str], object]) -> None:
        """Begins to take changes, on the running event loop.

        Args:
            on_failure: Called once if the state cannot be written, with the reason. The server has to stop then.
        """
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="gradserve-state", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The state directory."""
        return self._directory.path

    @property
    def database(self) -> Path:
        """The file of the metadata."""
        return self._directory.database

    def close(self) -> None:
        """Carries out the changes that were added, and closes the files."""
        if self._thread is not None:
            with self._arrived:
                self._is_closing = True
                self._arrived.notify()
            self._thread.join()
        self._files.close()

    def _close_commits(self) -> None:
        if self._commits is not None:
            self._commits.close()

    # Changes

    def new_blob(self) -> int:
        """Returns the number of a new blob."""
        return next(self._numbers)

    def add(self, change: Change) -> None:
        """Carries out a change at some time, after those before it."""
        self._submit(_Entry(change, None))

    async def commit(self, change: Change) -> None:
        """Carries out a change; returns when it survives a loss of power.

        Raises:
            ResourceExhaustedError: There is no space for its arrays; nothing has changed.
            UnavailableError: It could not be written; the server stops.
        """
        await self.submit(change)

    def submit(self, change: Change) -> asyncio.Future[None]:
        """Carries out a change; returns what is done when it survives a loss of power.

        It fails as `commit` does.
        """
        answer = self._future()
        self._submit(_Entry(change, answer))
        return answer

    async def flush(self) -> None:
        """Returns when all that was added before survives a loss of power.

        Raises:
            UnavailableError: It could not be written; the server stops.
        """
        await self.commit(Change())

    async def reserve(self, num_bytes: int) -> Space:
        """Sets space aside.

        Raises:
            ResourceExhaustedError: There is none.
            UnavailableError: The server stops.
        """
        free = self.segments.allocate_free(num_bytes) if self._failure is None else None
        if free is not None:
            return Space(free)
        answer = self._future()
        entry = _Entry(Change(), answer, needs_bytes=num_bytes)
        self._submit(entry)
        try:
            await answer
        except asyncio.CancelledError:
            if not answer.cancelled():  # it was there already; otherwise `_answer` gives it back when it is
                self.give_back(entry.space)
            raise
        assert entry.space is not None
        return entry.space

    def give_back(self, space: Space | None) -> None:
        """Gives back space that was set aside, of which nothing is used, at once."""
        if space is not None:
            extents, space.extents = space.extents, []
            self.segments.release(extents)

    # What is there, before `start`

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Returns the rows of a query.

        Raises:
            StateError: They are damaged.
        """
        try:
            return self._database.execute(query, values).fetchall()
        except UNREADABLE as error:
            raise StateError(f"{self._directory.database}: the database is damaged: {error}") from error

    @property
    def blobs(self) -> Sequence[int]:
        """The numbers of all blobs."""
        return list(self._blobs)

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(each.num_bytes for each in self._blobs.values())

    def size_of(self, number: int) -> int:
        """Returns the size of a blob's arrays; 0 if they cannot be read."""
        stored = self._blobs.get(number)
        return 0 if stored is None else stored.num_bytes

    def read(self, number: int, allocate: Allocate) -> list[Array]:
        """Returns the arrays of a blob.

        Raises:
            DamagedError: They are damaged.
            MemoryError: There is no memory for them.
        """
        if number in self._faults:
            raise DamagedError(self._faults[number])
        stored = self._blobs[number]
        arrays = [allocate(shape, dtype) for dtype, shape in stored.specs]
        pieces = bytes_of(arrays)
        extents = list(stored.extents)
        for piece in pieces:
            extents = self._fill(piece, extents)
        damaged = first_damaged(pieces, stored.checksums)
        if damaged is not None:
            path, offset = self._place(stored.extents, damaged)
            raise DamagedError(f"{path}: the values at {offset} are damaged: their checksum differs")
        return arrays

    def _fill(self, piece: memoryview, extents: list[Extent]) -> list[Extent]:
        """Fills memory; returns what is left of the space."""
        while piece:
            first = extents.pop(0)
            count = min(first.num_bytes, len(piece), _READ_BYTES)
            self.segments.read([Extent(first.segment, first.offset, count)], piece[:count])
            if self.on_read is not None:
                self.on_read(count)
            piece = piece[count:]
            if count < first.num_bytes:
                extents.insert(0, Extent(first.segment, first.offset + count, first.num_bytes - count))
        return extents

    def _place(self, extents: Sequence[Extent], position: int) -> tuple[Any, int]:
        for each in extents:
            if position < each.num_bytes:
                return self.segments.path(each.segment), each.offset + position
            position -= each.num_bytes
        return self._directory.database, 0

    def _read_blobs(self) -> tuple[dict[int, StoredArrays], dict[int, str]]:
        """Returns the blobs, and why others cannot be read."""
        found, faults = {}, {}
        for number, *columns in self.rows("SELECT id, arrays, extents, checksums FROM blob"):
            try:
                found[number] = StoredArrays.of_row(*columns)
            except (ValueError, TypeError) as error:
                faults[number] = f"{self._directory.database}: blob {number} is damaged: {error}"
        return found, faults

    # The thread

    def _future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def _submit(self, entry: _Entry) -> None:
        with self._arrived:
            self._entries.append(entry)
            self._arrived.notify()

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._entries and not self._is_closing:
                    self._arrived.wait()
                group = list(self._entries)
                self._entries.clear()
            if not group:
                return
            self._process(group)

    def _process(self, group: Sequence[_Entry]) -> None:
        """Carries out the collected changes, and answers their waiters."""
        if self._failure is None:
            try:
                self._carry_out(group)
            except Exception as error:  # whatever it is: from now on nobody knows what is on disk
                self._fail(error)
        if self._failure is not None:
            for each in group:
                self._settle(each, self._failure)

    def _carry_out(self, group: Sequence[_Entry]) -> None:
        assert self._commits is not None, "files with faults are only read"
        going = [each for each in group if self._find_space(each)]
        written: dict[int, StoredArrays] = {}
        for entry in going:
            for each in entry.change.arrays:
                written[each.number] = self._write(each)
        self.segments.flush()
        statements = [statement for entry in going for statement in entry.change.statements]
        removed = [number for entry in going for number in entry.change.removed]
        if statements or written or removed:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(
                "INSERT INTO blob (id, arrays, extents, checksums) VALUES (?, ?, ?, ?)",
                [(number, *stored.row()) for number, stored in written.items()],
            )
            for statement, values in statements:
                self._database.execute(statement, values)
            self._database.executemany("DELETE FROM blob WHERE id = ?", [(number,) for number in removed])
            self._newest += 1
            self._database.execute("UPDATE directory SET commits = ?", (self._newest,))
            self._database.execute("COMMIT")
            # Before anybody hears of the commit: what was answered can then be missed.
            self._commits.write(self._newest)
        self._blobs |= written
        gone = [stored for number in removed if (stored := self._blobs.pop(number, None)) is not None]
        if gone:
            # Only now: a write there destroys what the database referred to until a moment ago.
            self.segments.retire([extent for stored in gone for extent in stored.extents])
        for entry in going:
            self._settle(entry)

    def _find_space(self, entry: _Entry) -> bool:
        """Allocates space for an entry; if there is none, fails that entry and returns False."""
        allocated: list[Space] = []
        try:
            if entry.needs_bytes is not None:
                entry.space = Space(self.segments.allocate(entry.needs_bytes))
            for each in entry.change.arrays:
                if each.space is None:
                    each.space = Space(self.segments.allocate(sum(array.nbytes for array in each.arrays)))
                    allocated.append(each.space)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            for space in allocated:
                self.give_back(space)
            for each in entry.change.arrays:
                if each.space in allocated:
                    each.space = None
            self._settle(
                entry,
                ResourceExhaustedError(
                    f"there is no space in the state directory: {error.strerror}", code="GS_DISK_FULL"
                ),
            )
            return False
        return True

    def _write(self, blob: _Arrays) -> StoredArrays:
        assert blob.space is not None, "_find_space has found it"
        pieces = bytes_of(blob.arrays)
        extents, blob.space.extents = blob.space.extents, []
        used, unused = _split(extents, sum(map(len, pieces)))
        if blob.live:
            checksums = bytearray()
            self.segments.write(used, copies_of(pieces, checksums))
        else:
            self.segments.write(used, pieces)
            checksums = checksums_of(pieces)  # now, while the disk is busy with the bytes
        self.segments.release(unused)
        return StoredArrays([(each.dtype, each.shape) for each in blob.arrays], used, bytes(checksums))

    def _fail(self, error: Exception) -> None:
        reason = f"{self._directory.path}: the state cannot be written: {error}"
        self._failure = UnavailableError(f"the server stops: {reason}", code="GS_STATE_FAILED")
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_failure, reason)

    def _settle(self, entry: _Entry, error: ServiceError | None = None) -> None:
        if entry.answer is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                entry.answer.get_loop().call_soon_threadsafe(self._answer, entry, entry.answer, error)

    def _answer(self, entry: _Entry, future: asyncio.Future[None], error: ServiceError | None) -> None:
        if future.done():
            self.give_back(entry.space)  # nobody waits for it any more
        elif error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _split(extents: Sequence[Extent], num_bytes: int) -> tuple[list[Extent], list[Extent]]:
    """Splits space into what so many bytes take up, in whole blocks, and the rest."""
    left = whole_blocks(num_bytes)
    used, unused = [], []
    for each in extents:
        taken = min(left, each.num_bytes)
        if taken:
            used.append(Extent(each.segment, each.offset, taken))
        if taken < each.num_bytes:
            unused.append(Extent(each.segment, each.offset + taken, each.num_bytes - taken))
        left -= taken
    return used, unused
