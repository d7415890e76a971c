"""The marks of a resize in state directories, by which an interrupted one is completed or undone."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradserve_ray.states.movable import Key
from gradserve_server.storage.directory import StateError, remove_file, write_file

_MARK = "resize.json"
_HELD = "resized.json"


@dataclass(frozen=True)
class ResizeMark:
    """A change that is under way, as a state directory sees it.

    Attributes:
        id: Its id.
        before: The number of servers before it.
        after: The number of servers after it.
        incoming: The accumulators and parameters that come here. Until the change holds, they are beside those used.
        outgoing: Those that go, also if they come again with something else.
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
        record["incoming"] = tuple(Key(*key) for key in record["incoming"])
        record["outgoing"] = tuple(Key(*key) for key in record["outgoing"])
        return cls(**record)

    def write(self, folder: Path) -> None:
        """Leaves the mark in a state directory, in one step that survives a loss of power."""
        _write(folder / _MARK, asdict(self))

    @staticmethod
    def remove(folder: Path) -> None:
        """Removes the mark of a state directory, if there is one."""
        remove_file(folder / _MARK)


def holds(folder: Path, change: str) -> bool:
    """Returns whether a change holds, given the state directory of server 0, which alone knows."""
    record = _read(folder / _HELD)
    return record is not None and change in record["held"]


@dataclass(frozen=True)
class DecidedSize:
    """The number of servers that a cluster has since a change.

    Attributes:
        cluster: The id of the cluster, from its start to its end.
        epoch: How often it has changed its size.
        servers: The number of servers.
    """

    cluster: str
    epoch: int
    servers: int


def decide(folder: Path, change: str, size: DecidedSize | None = None) -> None:
    """Makes a change hold, and notes the size that a cluster has now, in one step that survives a loss of power."""
    record = _read(folder / _HELD) or {"held": []}
    _write(folder / _HELD, {"held": [*record["held"], change], "size": None if size is None else asdict(size)})


def decided_size(folder: Path, cluster: str) -> DecidedSize | None:
    """Returns the size that a cluster has since its latest change, given the state directory of server 0."""
    record = _read(folder / _HELD)
    found = None if record is None else record.get("size")
    return DecidedSize(**found) if found is not None and found["cluster"] == cluster else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StateError(f"{path}: the file is damaged: {error}") from error
    return record


def _write(path: Path, record: dict[str, Any]) -> None:
    write_file(path, json.dumps(record).encode())
