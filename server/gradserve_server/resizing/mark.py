"""What a change of the number of servers leaves in state directories, so that it can be ended if it is interrupted."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradserve_server.accumulators.durable.moving.rows import Key

_MARK = "resize.json"
_HELD = "resized.json"


@dataclass(frozen=True)
class ResizeMark:
    """A change that is under way, as a state directory sees it.

    Attributes:
        id: Its id.
        before: The number of servers before it.
        after: The number of servers after it.
        incoming: The accumulators that come here. Until the change holds, they are beside those that are used.
        outgoing: The accumulators that go, also if they come again with something else.
    """

    id: str
    before: int
    after: int
    incoming: tuple[Key, ...]
    outgoing: tuple[Key, ...]

    @classmethod
    def read(cls, folder: Path) -> "ResizeMark | None":
        """Returns the mark of a state directory, None if there is none."""
        record = _read(folder / _MARK)
        if record is None:
            return None
        record["incoming"] = tuple((container, name) for container, name in record["incoming"])
        record["outgoing"] = tuple((container, name) for container, name in record["outgoing"])
        return cls(**record)

    def write(self, folder: Path) -> None:
        """Leaves the mark in a state directory, in one step that survives a loss of power."""
        _write(folder / _MARK, asdict(self))

    @staticmethod
    def remove(folder: Path) -> None:
        """Removes the mark of a state directory, if there is one."""
        (folder / _MARK).unlink(missing_ok=True)


def holds(folder: Path, change: str) -> bool:
    """Returns whether a change holds, given the state directory of server 0, which alone knows."""
    record = _read(folder / _HELD)
    return record is not None and change in record["held"]


def decide(folder: Path, change: str) -> None:
    """Makes a change hold, in one step that survives a loss of power."""
    record = _read(folder / _HELD) or {"held": []}
    _write(folder / _HELD, {"held": [*record["held"], change]})


def revoke(folder: Path, change: str) -> None:
    """Takes the decision back, if there is one. No server may have acted upon it."""
    if holds(folder, change):
        record = _read(folder / _HELD)
        assert record is not None, "it was there a moment ago"
        _write(folder / _HELD, {"held": [each for each in record["held"] if each != change]})


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record


def _write(path: Path, record: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}")
    with beside.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
