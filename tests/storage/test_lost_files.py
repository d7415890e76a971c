"""State directories whose files are missing, older than others, or of another directory: never taken for new ones."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradserve_server.commands.cli import cli
from gradserve_server.storage import database as database_module
from gradserve_server.storage.database import FIRST_WITH_ID, CommitFile, make_database
from gradserve_server.storage.directory import DamagedError, LostDatabaseError, StateDirectory, StateError
from gradserve_server.storage.store import Change, StateStore
from tests.storage.copies import copy_state

_INSERT = "INSERT INTO newest_incarnation VALUES (0, ?) ON CONFLICT (place) DO UPDATE SET number = excluded.number"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["state", *map(str, arguments)])


def number_in(path: Path) -> int:
    """Returns what a directory has, as a server finds it."""
    store = StateStore(StateDirectory(path))
    try:
        return sum(number for (number,) in store.rows("SELECT number FROM newest_incarnation"))
    finally:
        store.close()


async def add(store: StateStore, first: int, last: int) -> None:
    store.start(pytest.fail)
    for number in range(first, last + 1):
        change = Change()
        change.execute(_INSERT, number)
        await store.commit(change)


@pytest.fixture
async def used(tmp_path: Path) -> Path:
    """A directory after seven commits, of which three are in the database without its log, as a kill leaves it."""
    path = tmp_path / "state"
    store = StateStore(StateDirectory(path))
    await add(store, 1, 3)
    store.close()
    store = StateStore(StateDirectory(path))
    await add(store, 4, 7)
    copy = tmp_path / "copy"
    copy_state(path, copy)
    store.close()
    return copy


def unlink(*names: str) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return spoil


def rewrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def cut_log(path: Path) -> None:
    log = path / "metadata.sqlite-wal"
    os.truncate(log, log.stat().st_size // 2)


def empty_database(path: Path) -> None:
    unlink("metadata.sqlite-wal")(path)
    os.truncate(path / "metadata.sqlite", 0)


def database_of_another_directory(path: Path) -> None:
    unlink("metadata.sqlite", "metadata.sqlite-wal")(path)
    make_database(path / "metadata.sqlite").close()


def no_tables(path: Path) -> None:
    unlink("metadata.sqlite", "metadata.sqlite-wal")(path)
    database = sqlite3.connect(path / "metadata.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()


def of_an_earlier_format(path: Path) -> None:
    database_of_another_directory(path)
    database = sqlite3.connect(path / "metadata.sqlite", isolation_level=None)
    later = ("part", "round", "state", "version", "update", "ledger", "event")
    database.executescript("".join([f"DROP TABLE parameters_{each};" for each in later]) + "DROP TABLE parameters;")
    database.executescript("DROP TABLE accumulator_round; DROP TABLE run;")
    database.executescript("DROP TABLE directory; ALTER TABLE part DROP COLUMN epoch; PRAGMA user_version = 2")
    database.close()


GONE = {
    "database and log gone": (unlink("metadata.sqlite", "metadata.sqlite-wal"), "metadata.sqlite: the file is missing"),
    "database gone": (unlink("metadata.sqlite"), "metadata.sqlite: the file is missing"),
    "database empty": (empty_database, "metadata.sqlite: the file is empty"),
    "database without tables": (no_tables, "metadata.sqlite: there is nothing in the file"),
}


@pytest.mark.parametrize(("spoil", "reason"), GONE.values(), ids=GONE.keys())
def test_a_database_that_is_gone_is_refused_and_the_repair_begins_anew(
    used: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(used)
    for _ in range(2):
        with pytest.raises(LostDatabaseError, match=f"{reason}, but the state directory was in use: restore the whole"):
            number_in(used)
        result = run("check", used)
        assert (result.exit_code, reason in result.output) == (1, True)
    result = run("repair", used)
    assert (result.exit_code, result.output.startswith("would remove everything: ")) == (1, True)
    with pytest.raises(LostDatabaseError):
        number_in(used)
    assert run("repair", used, "--yes").exit_code == 0
    assert run("check", used).exit_code == 0
    assert number_in(used) == 0


DIFFER = {
    "log gone": (unlink("metadata.sqlite-wal"), "expected commit 7 or a later one, got 3: .*4 commits are lost", 3),
    "log cut": (
        cut_log,
        r"expected commit 7 or a later one, got \d: its write-ahead log \(metadata.sqlite-wal\) is",
        5,
    ),
    "mark damaged": (rewrite("gradserve-state", os.urandom(64)), "gradserve-state: the mark .* is damaged", 7),
    "mark empty": (rewrite("gradserve-state", b""), "gradserve-state: the mark .* is damaged", 7),
    "number of commits gone": (unlink("segments/commits"), "segments/commits: the file is missing", 7),
    "number of commits damaged": (
        rewrite("segments/commits", bytes(8192)),
        "segments/commits: the number .* damaged",
        7,
    ),
    "segments gone": (lambda path: shutil.rmtree(path / "segments"), "segments/commits: the file is missing", 7),
    "database of another": (database_of_another_directory, "expected the database of the directory [0-9a-f]+, got", 0),
    "database of an earlier format": (
        of_an_earlier_format,
        f"expected format {FIRST_WITH_ID} or a later one, got 2",
        0,
    ),
}


@pytest.mark.parametrize(("spoil", "reason", "left"), DIFFER.values(), ids=DIFFER.keys())
def test_files_that_differ_are_refused_and_the_repair_goes_on_with_the_database(
    used: Path, spoil: Callable[[Path], object], reason: str, left: int
) -> None:
    spoil(used)
    with pytest.raises(DamagedError, match=rf"{reason}.*: restore the whole directory from a backup, or see what"):
        number_in(used)
    result = run("check", used)
    assert result.exit_code == 1
    assert "the files do not belong together" in result.output
    result = run("repair", used)
    assert (result.exit_code, result.output.startswith("would go on with what is there: ")) == (1, True)
    with pytest.raises(DamagedError):
        number_in(used)
    assert run("repair", used, "--yes").exit_code == 0
    assert run("check", used).exit_code == 0
    assert number_in(used) <= left


def test_segments_of_another_directory_are_refused(used: Path, tmp_path: Path) -> None:
    StateStore(StateDirectory(tmp_path / "other")).close()
    shutil.rmtree(used / "segments")
    copy_state(tmp_path / "other" / "segments", used / "segments")
    with pytest.raises(DamagedError, match=r"segments/commits: expected a file of the directory [0-9a-f]{32}, got one"):
        number_in(used)


async def test_a_commit_whose_number_was_not_written_yet_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after the commit, and before its number."""
    store = StateStore(StateDirectory(tmp_path / "state"))
    await add(store, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(CommitFile, "write", lambda *_: None)
        change = Change()
        change.execute(_INSERT, 3)
        await store.commit(change)
    copy_state(tmp_path / "state", tmp_path / "copy")
    store.close()
    assert number_in(tmp_path / "copy") == 3
    with closing(CommitFile(tmp_path / "copy" / "segments" / "commits")) as found:
        assert found.number == 3, "a start brings it up to date"


def test_a_number_that_was_torn_leaves_that_of_the_start(tmp_path: Path) -> None:
    made = CommitFile.make(tmp_path / "commits", "0" * 32, 5)
    for number in (6, 7):
        made.write(number)
    made.close()
    for number, place in ((7, database_module._LATEST), (5, database_module._AT_START)):
        with closing(CommitFile(tmp_path / "commits")) as found:
            assert found.number == number
        with (tmp_path / "commits").open("r+b") as file:
            file.seek(place + 35)
            file.write(b"\xff")
    with pytest.raises(DamagedError, match="the number of the newest commit is damaged"):
        CommitFile(tmp_path / "commits")


@pytest.mark.parametrize("made", ["database", "commits"])
def test_a_directory_whose_making_was_interrupted_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    def interrupted(*_: object) -> None:
        raise OSError("no power")

    with monkeypatch.context() as patched:
        if made == "database":
            patched.setattr(CommitFile, "make", interrupted)
        else:
            patched.setattr(StateDirectory, "identify", interrupted)
        with pytest.raises(OSError, match="no power"):
            StateStore(StateDirectory(tmp_path))
    assert (tmp_path / "metadata.sqlite").exists()
    assert number_in(tmp_path) == 0
    assert number_in(tmp_path) == 0


def test_a_server_that_came_second_does_not_make_the_directory_anew(tmp_path: Path) -> None:
    first = StateStore(StateDirectory(tmp_path))
    with pytest.raises(StateError, match="another process uses this state directory"):
        StateDirectory(tmp_path)
    first.close()
    assert not StateDirectory(tmp_path).is_new


async def test_names_survive_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be on disk, and the folder that has its name not."""
    flush, steps = os.fsync, []
    replace = Path.replace

    def flushed(descriptor: int) -> None:
        steps.append(f"flush {os.path.relpath(os.readlink(f'/proc/self/fd/{descriptor}'), tmp_path)}")
        flush(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        steps.append(f"replace {target.relative_to(tmp_path)}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    store = StateStore(StateDirectory(tmp_path / "state"))
    store.start(pytest.fail)
    await store.reserve(1)
    store.close()
    mark = ["flush state/.gradserve-state", "replace state/gradserve-state", "flush state"]
    commits = ["flush state/segments/.commits", "replace state/segments/commits", "flush state/segments"]
    segment = ["flush state/segments/000001.segment", "flush state/segments"]
    assert steps == ["flush .", *mark, "flush state", *commits, *mark, *segment]


async def test_all_files_are_private_also_in_a_folder_of_everybody(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    store = StateStore(StateDirectory(path))
    await add(store, 1, 1)
    space = await store.reserve(1)
    assert modes(path) == {0o600}
    assert stat.S_IMODE((path / "segments").stat().st_mode) == 0o700
    store.give_back(space)
    for each in path.rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    copy_state(path, tmp_path / "copy")
    store.close()
    store = StateStore(StateDirectory(tmp_path / "copy"))
    assert modes(tmp_path / "copy") == {0o600}, "files of earlier versions, too"
    store.close()
    made = StateStore(StateDirectory(tmp_path / "made"))
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    made.close()


def modes(path: Path) -> set[int]:
    return {stat.S_IMODE(each.stat().st_mode) for each in path.rglob("*") if each.is_file()}
