"""The state directory of a server that does not run, while its cluster changes its size."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradserve_server.accumulators.durable.moving import (
    Key,
    MovableAccumulator,
    addition,
    keys_of,
    read_movable,
    removal_of,
)
from gradserve_server.resizing.mark import ResizeMark
from gradserve_server.state.files.directory import StateDirectory
from gradserve_server.state.files.errors import StateError
from gradserve_server.state.files.store import Change, StateStore


@dataclass(frozen=True)
class Contents:
    """What is in a state directory.

    Attributes:
        digests: The accumulators, each with the digest of all that there is of it.
        num_layers: The number of batch normalization layers.
        sharded: The accumulators of which each server has some parts.
    """

    digests: dict[Key, str]
    num_layers: int
    sharded: tuple[Key, ...] = ()


class MemberState:
    """Reads and changes a state directory. Every method opens it, and lets others use it at its end.

    All methods raise StateError or OSError if it is damaged or in use.
    """

    def __init__(self, path: Path) -> None:
        """Takes the folder, which is made when something comes there."""
        self._path = path

    def contents(self) -> Contents:
        """Returns what there is, after all values of accumulators were verified."""
        if not self._path.exists():
            return Contents({}, 0)
        with self._opened() as store:
            digests = {key: read_movable(store, key).digest for key in keys_of(store)}
            ((num_layers,),) = store.rows("SELECT count(*) FROM layer")
            specs = store.rows("SELECT container, name, spec FROM accumulator ORDER BY container, name")
        sharded = tuple((container, name) for container, name, spec in specs if json.loads(spec).get("num_shards"))
        return Contents(digests, num_layers, sharded)

    def read(self, key: Key) -> MovableAccumulator:
        """Returns an accumulator."""
        with self._opened() as store:
            return read_movable(store, key)

    def begin(self, mark: ResizeMark) -> None:
        """Notes which change begins."""
        with self._opened():
            mark.write(self._path)

    def add(self, moved: MovableAccumulator) -> None:
        """Takes over an accumulator; returns when it survives a loss of power."""
        with self._opened() as store:
            _carry_out(store, addition(store, moved))

    def decide(self) -> None:
        """Notes that the change holds. What goes elsewhere is removed by `settle`."""
        if (mark := ResizeMark.read(self._path)) is not None:
            mark.as_decided().write(self._path)

    def cancel(self) -> None:
        """Ends the change as if it had never begun."""
        if (mark := ResizeMark.read(self._path)) is not None:
            self._end(mark.incoming)

    def settle(self, size: int) -> None:
        """Ends the change before the server of a cluster of a size starts.

        One that holds removes what is elsewhere; one that was interrupted is cancelled.

        Raises:
            StateError: It was interrupted before it held, and the cluster has another size than before it.
        """
        mark = ResizeMark.read(self._path)
        if mark is None:
            return
        if mark.decided:
            self._end(mark.outgoing)
        elif size == mark.before:
            self._end(mark.incoming)
        else:
            raise StateError(
                f"{self._path}: a change from {mark.before} to {mark.after} servers was interrupted: start the cluster "
                f"with {mark.before} servers, as before"
            )

    def _end(self, removed: tuple[Key, ...]) -> None:
        with self._opened() as store:
            _carry_out(store, removal_of(store, removed))
        ResizeMark.remove(self._path)

    @contextmanager
    def _opened(self) -> Iterator[StateStore]:
        store = StateStore(StateDirectory(self._path))
        try:
            yield store
        finally:
            store.close()


def _carry_out(store: StateStore, change: Change) -> None:
    failures: list[str] = []

    async def commit() -> None:
        store.start(failures.append)
        await store.commit(change)

    asyncio.run(commit())
    if failures:
        raise StateError(failures[0])
