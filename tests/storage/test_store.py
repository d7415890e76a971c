"""Changes of a state directory: all or nothing, in order, and there for good once they are committed."""

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from gradserve_server.storage.database import FORMAT
from gradserve_server.storage.directory import StateDirectory, StateError
from gradserve_server.storage.segments import Extent, Segments
from gradserve_server.storage.store import Change, StateStore
from tests.servers.polling import PATIENCE_SECONDS
from tests.storage.copies import copy_state

INSERT = (
    "INSERT INTO accumulator (id, container, name, incarnation, durability, spec, lifetime) "
    "VALUES (?, '', ?, '', '', '', '')"
)


def inserted(number: int, name: str | None = None) -> Change:
    change = Change()
    change.execute(INSERT, number, name or str(number))
    return change


def numbers(store: StateStore) -> list[int]:
    return [number for (number,) in store.rows("SELECT id FROM accumulator ORDER BY id")]


class Disk:
    """A state directory, and its store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures: list[str] = []
        self.store = StateStore(StateDirectory(path))
        self.store.start(self.failures.append)

    def crash(self) -> "Disk":
        """Returns what another server finds after this one was killed."""
        copy = self.path.with_name(self.path.name + "x")
        copy_state(self.path, copy)
        return Disk(copy)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    made = Disk(tmp_path / "state")
    yield made
    made.store.close()


ARRAYS: list[Any] = [
    np.arange(3_000_000, dtype=np.float32),
    np.zeros((0, 4)),
    np.array(3, np.int64),
    np.ones((7, 5), ml_dtypes.bfloat16)[:, ::2],
]


async def test_what_is_committed_is_there_after_a_crash(disk: Disk) -> None:
    change = inserted(1)
    blob = disk.store.new_blob()
    change.put(blob, ARRAYS)
    await disk.store.commit(change)
    after = disk.crash()
    assert numbers(after.store) == [1]
    for stored, array in zip(after.store.read(blob, np.empty), ARRAYS, strict=True):
        assert (stored.dtype, stored.shape, stored.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert after.store.new_blob() > blob
    after.store.close()


async def test_changes_are_carried_out_in_order_and_share_flushes(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = []
    flush = Segments.flush

    def counted(segments: Segments) -> None:
        flushes.append(1)
        flush(segments)

    monkeypatch.setattr(Segments, "flush", counted)
    for number in range(100):
        disk.store.add(inserted(number))
    await disk.store.flush()
    assert numbers(disk.store) == list(range(100))
    assert len(flushes) <= 3


async def test_checksums_fit_what_is_written_of_memory_that_changes(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have access to it, and must not be able to make a directory that the next server refuses."""
    values = np.zeros(3 << 20, np.uint8)
    write = os.pwrite

    def rewrite(descriptor: int, data: Any, offset: int) -> int:
        count = write(descriptor, data, offset)
        values[:] += 1
        return count

    monkeypatch.setattr("os.pwrite", rewrite)
    change = inserted(1)
    change.put(1, [values], live=True)
    await disk.store.commit(change)
    after = disk.crash()
    assert set(after.store.read(1, np.empty)[0]) == {0, 1, 2}
    after.store.close()


async def test_space_of_removed_arrays_is_used_again(disk: Disk) -> None:
    array = np.ones(5 << 20, np.uint8)
    previous: list[int] = []
    for _ in range(30):
        change = Change()
        change.remove(previous)
        previous = [disk.store.new_blob()]
        change.put(previous[0], [array])
        await disk.store.commit(change)
    files = list((disk.path / "segments").glob("*.segment"))
    assert len(files) == 1


async def test_reserved_space_is_used_and_the_rest_given_back(disk: Disk) -> None:
    space = await disk.store.reserve(30 << 20)
    blob = disk.store.new_blob()
    change = Change()
    change.put(blob, [np.ones(100, np.uint8)], space)
    await disk.store.commit(change)
    assert disk.store.segments.num_free == (64 << 20) - 4096
    assert disk.store.read(blob, np.empty)[0].sum() == 100


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
async def test_space_is_given_back_if_nobody_waits_for_it_any_more(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    allocate = Segments.allocate

    def allocate_later(segments: Segments, num_bytes: int) -> list[Extent]:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return allocate(segments, num_bytes)

    monkeypatch.setattr(Segments, "allocate", allocate_later)
    reserving = asyncio.create_task(disk.store.reserve(60 << 20))
    await asyncio.sleep(0)
    if when == "before":
        reserving.cancel()
    await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    if when == "meanwhile":
        reserving.cancel()
    go_on.set()
    if when == "after":
        # The store has answered, and the task has not gone on yet.
        disk.store._answer = lambda *given, answer=disk.store._answer: (answer(*given), reserving.cancel())  # type: ignore
    with pytest.raises(asyncio.CancelledError):
        await reserving
    await disk.store.flush()
    assert disk.store.segments.num_free == disk.store.segments.num_bytes > 0


async def test_a_full_disk_fails_one_change_alone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    change = inserted(1)
    change.put(disk.store.new_blob(), [np.ones(10)])
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory: No space left"):
        await disk.store.commit(change)
    with pytest.raises(ResourceExhaustedError, match="no space"):
        await disk.store.reserve(1)
    await disk.store.commit(inserted(2))
    assert numbers(disk.store) == [2]
    monkeypatch.undo()
    await disk.store.commit(change)
    assert numbers(disk.store) == [1, 2]
    assert not disk.failures


@pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
async def test_after_a_write_that_failed_nothing_is_written_any_more(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    change = inserted(1)
    change.put(disk.store.new_blob(), [np.ones(10)])
    with pytest.raises(UnavailableError, match=r"the server stops: .*the state cannot be written: .*Input/output"):
        await disk.store.commit(change)
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the server stops"):
            await disk.store.commit(inserted(2))
    await asyncio.sleep(0)
    assert len(disk.failures) == 1
    assert numbers(disk.store) == []


async def test_a_fault_of_the_database_stops_it_too(disk: Disk) -> None:
    await disk.store.commit(inserted(1, "same"))
    with pytest.raises(UnavailableError, match="UNIQUE constraint failed"):
        await disk.store.commit(inserted(2, "same"))
    assert numbers(disk.store) == [1]


async def test_what_was_added_is_written_before_the_end(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    disk.store.add(inserted(1))
    disk.store.close()
    again = Disk(tmp_path / "state")
    assert numbers(again.store) == [1]
    again.store.close()


# --- Directories that cannot be used


async def test_two_servers(disk: Disk) -> None:
    with pytest.raises(StateError, match="state: another process uses this state directory"):
        StateDirectory(disk.path)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(StateError, match=r"expected a state directory of gradserve, but it has 'thesis.txt'"):
        StateDirectory(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file: expected a directory"):
        StateDirectory(tmp_path / "file")


def test_one_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no state directory"):
        StateDirectory(tmp_path / "state", make=False)
    with pytest.raises(StateError, match="it is empty"):
        StateDirectory(tmp_path, make=False)
    assert os.listdir(tmp_path) == []


async def stored(path: Path) -> tuple[Path, int]:
    disk = Disk(path)
    change = inserted(1)
    blob = disk.store.new_blob()
    change.put(blob, [np.ones(3 << 20, np.uint8)])
    await disk.store.commit(change)
    disk.store.close()
    return path, blob


@pytest.mark.parametrize(("offset", "block"), [(0, 0), (5000, 0), (2 << 20, 2 << 20), ((3 << 20) - 1, 2 << 20)])
async def test_a_byte_that_has_changed(tmp_path: Path, offset: int, block: int) -> None:
    path, blob = await stored(tmp_path / "state")
    with (path / "segments" / "000001.segment").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x02")
    store = StateStore(StateDirectory(path))
    with pytest.raises(StateError, match=rf"000001.segment: the values at {block} are damaged: their checksum differs"):
        store.read(blob, np.empty)
    store.close()


async def test_a_segment_that_is_gone(tmp_path: Path) -> None:
    path, _ = await stored(tmp_path / "state")
    (path / "segments" / "000001.segment").unlink()
    with pytest.raises(StateError, match="000001.segment: the file is missing"):
        StateStore(StateDirectory(path))


@pytest.mark.parametrize("damage", ["header", "page", "reference", "later format"])
async def test_metadata_that_cannot_be_used(tmp_path: Path, damage: str) -> None:
    path, _ = await stored(tmp_path / "state")
    database = path / "metadata.sqlite"
    if damage in ("header", "page"):
        with database.open("r+b") as file:
            file.seek(0 if damage == "header" else 4096)
            file.write(b"x" * 500)
    else:
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            if damage == "reference":
                connection.execute("INSERT INTO ledger VALUES (77, 1, '')")
            else:
                connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    expected = "expected format" if damage == "later format" else "the database is damaged"
    for _ in range(2):  # the directory is let go each time
        with pytest.raises(StateError, match=f"metadata.sqlite: {expected}"):
            StateStore(StateDirectory(path))
