"""The mark of a change in a state directory: what an interrupted one has left there."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradserve_server.accumulators.durable.moving import Key

_NAME = "resize.json"


@dataclass(frozen=True)
class ResizeMark:
    """A change of the number of servers, as a state directory sees it.

    Attributes:
        before: The number of servers before it.
        after: The number of servers after it.
        incoming: The accumulators that come here. Until the change is decided, they are also where they were.
        outgoing: The accumulators that go elsewhere. Once the change is decided, they are there.
        decided: Whether the change holds. Before that, incoming ones are removed again; after it, outgoing ones.
    """

    before: int
    after: int
    incoming: tuple[Key, ...]
    outgoing: tuple[Key, ...]
    decided: bool = False

    @classmethod
    def read(cls, folder: Path) -> "ResizeMark | None":
        """Returns the mark of a state directory, None if there is none."""
        try:
            record: dict[str, Any] = json.loads((folder / _NAME).read_text())
        except FileNotFoundError:
            return None
        record["incoming"] = tuple((container, name) for container, name in record["incoming"])
        record["outgoing"] = tuple((container, name) for container, name in record["outgoing"])
        return cls(**record)

    def write(self, folder: Path) -> None:
        """Leaves the mark in a state directory, in one step."""
        beside = folder / f".{_NAME}"
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(folder / _NAME)

    def as_decided(self) -> "ResizeMark":
        """Returns the mark of the change once it holds."""
        return replace(self, decided=True)

    @staticmethod
    def remove(folder: Path) -> None:
        """Removes the mark of a state directory, if there is one."""
        (folder / _NAME).unlink(missing_ok=True)
