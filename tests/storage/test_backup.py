"""Backups of state directories: of one moment, whole or not there, and of no use to anybody but `restore`."""

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gradserve_server.storage.backup import back_up, remove_backup, remove_unfinished, restore
from gradserve_server.storage.directory import DamagedError, InUseError, StateDirectory, StateError
from gradserve_server.storage.segments import Segments, kept_from_reuse
from gradserve_server.storage.store import Change, StateStore
from tests.storage.copies import copy_state

VALUES = 700_000
"""In each array: it has three chunks, the last of which is shorter."""
NUM_BLOBS = 4


class Disk:
    """A state directory that a server uses, with arrays whose values are all equal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = StateStore(StateDirectory(path))
        self.store.start(pytest.fail)
        self.blobs: list[int] = []

    async def put(self, value: float) -> None:
        """Replaces all arrays by others."""
        change = Change()
        change.execute("DELETE FROM newest_incarnation")
        change.execute("INSERT INTO newest_incarnation VALUES (0, ?)", int(value))
        change.remove(self.blobs)
        self.blobs = [self.store.new_blob() for _ in range(NUM_BLOBS)]
        for each in self.blobs:
            change.put(each, [np.full(VALUES, value, np.float32)])
        await self.store.commit(change)

    def putting(self, values: range) -> Callable[[int], object]:
        """Returns a function for another thread that replaces all arrays with the next value whenever it is called."""
        loop, left = asyncio.get_running_loop(), iter(values)

        def put(_num_bytes: int) -> None:
            for value in left:
                asyncio.run_coroutine_threadsafe(self.put(value), loop).result()
                return

        return put


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    made = Disk(tmp_path / "state")
    await made.put(1)
    yield made
    made.store.close()


def values_in(path: Path, *, is_backup: bool = True) -> set[float]:
    """Returns all different values, and the number that was written with them."""
    with closing(StateStore(StateDirectory(path, make=False, may_be_backup=is_backup))) as store:
        arrays = [array for blob in store.blobs for array in store.read(blob, np.empty)]
        assert [len(each) for each in arrays] == [VALUES] * NUM_BLOBS
        ((number,),) = store.rows("SELECT number FROM newest_incarnation")
        return {float(number), *[float(value) for each in arrays for value in np.unique(each)]}


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def restored(backup: Path, directory: Path) -> Path:
    restore(backup, directory, lambda _database: None)
    return directory


async def test_values_that_are_replaced_meanwhile_stay_until_they_are_copied(disk: Disk, tmp_path: Path) -> None:
    taken = await asyncio.to_thread(back_up, disk.path, tmp_path / "backup", disk.putting(range(2, 8)))
    assert (taken.path, taken.commit, taken.num_bytes) == (tmp_path / "backup", 1, 4 * VALUES * NUM_BLOBS)
    assert values_in(tmp_path / "backup") == {1}
    size = disk.store.segments.num_bytes
    for value in range(8, 12):
        await disk.put(value)
    assert disk.store.segments.num_bytes == size, "afterwards, their space is used again"


async def test_servers_that_start_during_a_backup_leave_the_values_alone(disk: Disk, tmp_path: Path) -> None:
    copy_state(disk.path, tmp_path / "stopped")
    loop, values = asyncio.get_running_loop(), iter((2, 3, 4))

    async def replace_in_a_new_run(value: float) -> None:
        started = Disk(tmp_path / "stopped")
        started.blobs = list(started.store.blobs)
        await started.put(value)
        started.store.close()

    def start(_num_bytes: int) -> None:
        for value in values:
            asyncio.run_coroutine_threadsafe(replace_in_a_new_run(value), loop).result()

    await asyncio.to_thread(back_up, tmp_path / "stopped", tmp_path / "backup", start)
    assert values_in(tmp_path / "backup") == {1}
    assert values_in(tmp_path / "stopped", is_backup=False) == {4}


def process_that_stops_during_a_backup(directory: Path, backup: Path) -> "subprocess.Popen[bytes]":
    program = (
        "import sys, pathlib\n"
        "from gradserve_server.storage.backup import back_up\n"
        "back_up(*map(pathlib.Path, sys.argv[1:]), lambda _: print(flush=True) or sys.stdin.read())\n"
    )
    command = [sys.executable, "-c", program, str(directory), str(backup)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_the_space_of_removed_values_is_used_again_when_the_process_of_a_backup_was_killed(
    disk: Disk, tmp_path: Path
) -> None:
    backup = tmp_path / "backups" / "backup"
    backup.parent.mkdir()
    with process_that_stops_during_a_backup(disk.path, backup) as process:
        assert process.stdout is not None
        process.stdout.readline()
        await disk.put(2)
        await disk.put(3)
        size = disk.store.segments.num_bytes
        with pytest.raises(InUseError, match=r"\.backup\.unfinished: another process is writing a copy there"):
            await asyncio.to_thread(back_up, disk.path, backup)
        process.send_signal(signal.SIGKILL)
    assert names_in(backup.parent) == [".backup.unfinished"]
    for value in range(4, 9):
        await disk.put(value)
    assert disk.store.segments.num_bytes <= size
    await asyncio.to_thread(back_up, disk.path, backup)
    assert names_in(backup.parent) == ["backup"]
    assert values_in(backup) == {8}


async def test_a_backup_that_ends_early_leaves_nothing(disk: Disk, tmp_path: Path) -> None:
    def stop(_num_bytes: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        await asyncio.to_thread(back_up, disk.path, tmp_path / "backup", stop)
    assert names_in(tmp_path) == ["state"]


IN_THE_WAY: dict[str, tuple[str, str]] = {
    "a folder with something in it": ("full", "full: expected a new or an empty folder, but it has 'file'"),
    "a file": ("full/file", "full/file: expected a new or an empty folder, got a file"),
    "no folder around it": ("none/backup", "none/backup: expected a folder in one that exists, and there is no .*none"),
    "the state directory": ("state", "state: expected a folder outside of the state directory"),
    "a folder in it": ("state/segments/backup", "expected a folder outside of the state directory"),
}


@pytest.mark.parametrize(("name", "message"), IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
async def test_a_place_that_is_taken_is_refused(disk: Disk, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StateError, match=message):
        back_up(disk.path, tmp_path / name)
    assert names_in(tmp_path) == ["full", "state"]


async def test_an_empty_folder_is_used(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    back_up(disk.path, tmp_path / "backup")
    assert values_in(tmp_path / "backup") == {1}


async def test_what_does_not_fit_is_refused_before_it_is_copied(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs
    fields = list(statvfs(tmp_path))
    fields[4] = (1 << 26) // fields[1] + 100  # f_bavail: the database fits, the values do not
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    with pytest.raises(
        StateError, match=r"backup\.unfinished: there is not enough space on the disk: expected \d+ byt"
    ):
        back_up(disk.path, tmp_path / "backup")
    assert names_in(tmp_path) == ["state"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
async def test_a_disk_that_gets_full_is_named_and_the_server_goes_on(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    allowed = getattr(os, call)

    def full(descriptor: int, *arguments: object) -> object:
        if ".unfinished" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allowed(descriptor, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(StateError, match="/backup: no space left on device"):
            back_up(disk.path, tmp_path / "backup")
        await disk.put(2)
    assert names_in(tmp_path) == ["state"]
    back_up(disk.path, tmp_path / "backup")
    assert values_in(tmp_path / "backup") == {2}


async def test_damaged_values_are_in_no_backup(disk: Disk, tmp_path: Path) -> None:
    segment = next((disk.path / "segments").glob("*.segment"))
    with segment.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"damage")
    with pytest.raises(DamagedError, match=r"000001\.segment: the values at \d+ are damaged: their checksum differs"):
        back_up(disk.path, tmp_path / "backup")
    assert names_in(tmp_path) == ["state"]


async def test_a_database_that_lost_commits_is_in_no_backup(disk: Disk, tmp_path: Path) -> None:
    await disk.put(2)
    copy_state(disk.path, tmp_path / "copy")
    (tmp_path / "copy" / "metadata.sqlite-wal").unlink()
    with pytest.raises(DamagedError, match="expected commit 2 or a later one, got 0"):
        back_up(tmp_path / "copy", tmp_path / "backup")


async def test_servers_leave_a_backup_alone_until_it_is_restored(disk: Disk, tmp_path: Path) -> None:
    back_up(disk.path, tmp_path / "backup")
    with pytest.raises(StateError, match=r"this is a backup, .*: `gradserve state restore .*/backup DIRECTORY` makes"):
        StateDirectory(tmp_path / "backup")
    first, second = [restored(tmp_path / "backup", tmp_path / name) for name in ("first", "second")]
    assert values_in(first, is_backup=False) == values_in(second, is_backup=False) == {1}
    ids = [
        StateDirectory(each, make=False, may_be_backup=True) for each in (disk.path.parent / "backup", first, second)
    ]
    assert len({each.id for each in ids}) == 3
    for each in ids:
        each.close()


async def test_what_is_in_use_or_no_backup_is_not_restored(disk: Disk, tmp_path: Path) -> None:
    back_up(disk.path, tmp_path / "backup")
    for backup, directory, message in (
        (disk.path, tmp_path / "new", "expected a backup of `gradserve state backup`, got a state directory"),
        (tmp_path / "none", tmp_path / "new", "none: there is no state directory"),
        (tmp_path / "backup", disk.path, "state: expected a new or an empty folder, but it has 'gradserve-state'"),
    ):
        with pytest.raises(StateError, match=message):
            restored(backup, directory)
    assert not (tmp_path / "new").exists()


async def test_an_interrupted_restore_is_refused_by_servers_and_can_begin_again(disk: Disk, tmp_path: Path) -> None:
    back_up(disk.path, tmp_path / "backup")

    def stop(_num_bytes: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        restore(tmp_path / "backup", tmp_path / "restored", lambda _database: None, stop)
    with pytest.raises(StateError, match="not all of a backup was copied to this directory"):
        StateDirectory(tmp_path / "restored")
    assert values_in(restored(tmp_path / "backup", tmp_path / "restored"), is_backup=False) == {1}


async def test_only_what_is_left_of_interrupted_backups_is_removed(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    names = (".1.unfinished", ".2.unfinished", ".other.unfinished", "1", "3.unfinished")
    for name in names:
        (folder / name / "segments").mkdir(parents=True)
    descriptor = os.open(folder / ".2.unfinished", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    remove_unfinished(folder, str.isdecimal)
    os.close(descriptor)
    assert names_in(folder) == sorted(names[1:])
    remove_backup(folder / "1")
    assert names_in(folder) == sorted([*names[1:3], names[4]])


def test_space_is_used_again_after_the_last_reader_has_gone(tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    with closing(Segments(folder, 1 << 20)) as segments:
        extents = segments.allocate(1 << 20)
        with kept_from_reuse(folder):
            with kept_from_reuse(folder):
                segments.retire(extents)
                assert segments.num_free == 0
            (first,) = segments.allocate(1 << 20)
            assert first.segment == 2
        assert segments.allocate(1 << 20) == extents
