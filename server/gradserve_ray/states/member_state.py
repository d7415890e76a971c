"""The state directory of a server that does not run, while its cluster changes its size."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from gradserve_ray.states import mark as marks
from gradserve_ray.states.mark import DecidedSize, ResizeMark
from gradserve_ray.states.movable import (
    Key,
    MovableResource,
    Rows,
    Slices,
    acceptance,
    addition,
    addition_of_parts,
    digests_of,
    keys_of,
    needed,
    number_of,
    parts_of,
    read_movable,
    removal_of_incoming,
    slices_of,
)
from gradserve_ray.states.redividing import (
    ParametersShard,
    PieceDigests,
    Pieces,
    Redivision,
    decided_since,
    piece_digests,
    read_outline,
    read_pieces,
)
from gradserve_ray.states.shards import unshard
from gradserve_server.accumulators.journal import PartKey, Staged, newest_number, number_change
from gradserve_server.errors import ServiceError
from gradserve_server.parameters.record import DecidedRound
from gradserve_server.parameters.restoring import follow_rounds
from gradserve_server.storage.directory import StateDirectory, StateError
from gradserve_server.storage.store import Change, StateStore


class MoveError(Exception):
    """Accumulators or parameters could not be moved; every server has what it had before."""


class UnknownOutcomeError(Exception):
    """It is unknown whether accumulators and parameters have moved; server 0 finds out before the cluster starts."""


class AnnouncementError(Exception):
    """Accumulators and parameters have moved, but announcing the move failed."""


PartDigests: TypeAlias = dict[PartKey, dict[tuple[str, int], str]]
"""Digests of gradients, by component and first row."""


@dataclass(frozen=True)
class Sharded:
    """The part of a sharded accumulator in one server's state directory.

    Attributes:
        incarnation: Its incarnation there.
        spec: Its specification, as JSON.
        needed: At its home, the ids of the gradients that it needs, by round.
        parts: The gradients of which the server holds something, with their local steps.
    """

    incarnation: str
    spec: str
    needed: Mapping[int, frozenset[str]]
    parts: Mapping[PartKey, Staged]


@dataclass(frozen=True)
class Contents:
    """The contents of a state directory.

    Attributes:
        digests: The accumulators and parameters, each with the digest of all that there is of it, but for gradients
            that are held.
        num_layers: The number of batch normalization layers.
        sharded: The accumulators that are sharded.
        newest_number: The number of the newest incarnation of sharded accumulators whose home the server was; 0 if
            there was none.
        sharded_parameters: The parameters that are sharded.
    """

    digests: Mapping[Key, str]
    num_layers: int
    sharded: Mapping[Key, Sharded] = field(default_factory=dict)
    newest_number: int = field(default=0, compare=False)
    sharded_parameters: Mapping[Key, ParametersShard] = field(default_factory=dict)

    def held_for(self, key: Key, home_incarnation: str) -> dict[PartKey, Staged]:
        """Returns the gradients that are held for an accumulator in its present life, with their local steps."""
        found = self.sharded.get(key)
        parts = {} if found is None else found.parts
        return {part: step for part, step in parts.items() if part.home_incarnation == home_incarnation}


class MemberState:
    """Reads and changes a state directory. Most methods open it, and let others use it at their end.

    What comes with a change of the number of servers is beside what there is. The change holds as soon as the directory
    of server 0 says so, in one step: `settle` asks it, before a server starts, and then all have what comes in the
    place of what goes, or none.

    All methods raise StateError or OSError if it is damaged or in use.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, holds: Callable[[str], bool] | None = None) -> None:
        """Takes the folder, which is made when something comes there.

        Args:
            path: The folder.
            holds: Asks the state directory of server 0 whether a change holds; None if this is that one. It raises
                StateError if it cannot tell.
        """
        self.path = path
        self._asked = holds or self.holds

    def contents(self, *, incoming: bool = False) -> Contents:
        """Returns what there is, or what has come, after all values but those of gradients that are held were verified.

        Args:
            incoming: Whether to return what has come.
        """
        if not self.path.exists():
            return Contents({}, 0)
        with self._opened() as store:
            keys = keys_of(store, incoming=incoming)
            movable = {key: read_movable(store, key, incoming=incoming) for key in keys}
            ((num_layers,),) = store.rows("SELECT count(*) FROM layer")
            all_sharded = [key for key, found in movable.items() if json.loads(found.spec).get("num_shards")]
            sharded = {
                key: Sharded(
                    movable[key].incarnation, movable[key].spec, needed(store, keys[key]), parts_of(store, keys[key])
                )
                for key in all_sharded
                if key.kind == "accumulator"
            }
            parameters = {key: ParametersShard.of(movable[key]) for key in all_sharded if key.kind == "parameters"}
            number = newest_number(store)
        return Contents({key: found.digest for key, found in movable.items()}, num_layers, sharded, number, parameters)

    def read(self, key: Key) -> MovableResource:
        """Returns an accumulator without gradients that are held, or parameters."""
        with self._opened() as store:
            return read_movable(store, key)

    def read_parts(
        self, key: Key, parts: Collection[PartKey], wanted: Mapping[str, tuple[int, Rows]]
    ) -> dict[PartKey, Slices]:
        """Returns some rows of gradients that are held; see `slices_of`."""
        with self._opened() as store:
            return slices_of(store, key, parts, wanted)

    def part_digests(
        self,
        key: Key,
        parts: Collection[PartKey],
        held: Mapping[str, Rows],
        cuts: Mapping[str, Collection[int]],
        *,
        incoming: bool,
    ) -> PartDigests:
        """Returns digests of gradients that are held, after they were verified; see `digests_of`."""
        with self._opened() as store:
            number = number_of(store, key, incoming=incoming)
            return {part: digests_of(store, number, part, held, cuts) for part in parts}

    def note_number(self, number: int) -> None:
        """Makes the server number sharded accumulators from there on, whether the change holds or not."""
        with self._opened() as store:
            _carry_out(store, number_change(number))

    def begin(self, mark: ResizeMark) -> None:
        """Notes which change begins."""
        with self._opened():
            mark.write(self.path)

    def add(self, moved: MovableResource, spec: str | None = None, *, is_home: bool = True) -> None:
        """Adds an accumulator or parameters beside what is here; returns when they survive a loss of power.

        Args:
            moved: The accumulator, or the parameters.
            spec: Its specification, if that changes.
            is_home: Whether the server will be its home; otherwise it gets nothing but what it holds of gradients.
        """
        with self._opened() as store:
            taken = moved if spec is None else moved.with_spec(spec)
            _carry_out(store, addition(store, taken if is_home else taken.elsewhere()))

    def add_parts(
        self, key: Key, parts: Mapping[PartKey, Staged], names: Sequence[str], *given: Mapping[PartKey, Slices]
    ) -> None:
        """Takes what the server is to hold of gradients, for an accumulator that has come; see `addition_of_parts`."""
        with self._opened() as store:
            _carry_out(store, addition_of_parts(store, key, parts, names, given))

    def make_whole(self, key: Key) -> None:
        """Makes a sharded accumulator whole that has come, and that is on this server alone; see `unshard`."""
        with self._opened() as store:
            _carry_out(store, asyncio.run(unshard(store, key)))

    # Sharded parameters

    def outline(self, key: Key) -> MovableResource:
        """Returns the decisions of the home of sharded parameters; see `read_outline`."""
        with self._opened() as store:
            return read_outline(store, key)

    def decided_since(self, key: Key, step: int) -> tuple[DecidedRound, ...]:
        """Returns the rounds of sharded parameters after a step, if this is the state directory of their home."""
        with self._opened() as store:
            return decided_since(store, key, step)

    def follow(self, key: Key, rounds: Sequence[DecidedRound]) -> None:
        """Makes the versions of rounds that the home of sharded parameters has decided.

        Raises:
            MoveError: An update that one of them needs is not here.
        """
        with self._opened() as store:
            number = number_of(store, key)
            try:
                _write(store, lambda: follow_rounds(store, number, rounds))
            except ServiceError as error:
                raise MoveError(f"{key} of {self.path} cannot be brought to their newest version: {error}") from error

    def read_pieces(self, key: Key, wanted: Mapping[str, tuple[int, Rows]]) -> Pieces:
        """Returns some rows of the newest version of sharded parameters; see `read_pieces` of `redividing`."""
        with self._opened() as store:
            return read_pieces(store, key, wanted, incoming=False)

    def piece_digests(
        self, key: Key, rows: Mapping[str, Rows], cuts: Mapping[str, Collection[int]], *, incoming: bool
    ) -> PieceDigests:
        """Returns digests of the rows that the server has of sharded parameters."""
        wanted = {name: (held.start, held) for name, held in rows.items()}
        with self._opened() as store:
            return piece_digests(read_pieces(store, key, wanted, incoming=incoming), rows, cuts)

    def add_shard(self, each: Redivision, server: int, outline: MovableResource, *given: Pieces) -> None:
        """Adds the shard of this server beside what is here; see `Redivision.shard`."""
        with self._opened() as store:
            _carry_out(store, addition(store, each.shard(server, outline, given)))

    # The decision

    def decide(self, change: str, size: DecidedSize | None = None) -> None:
        """Commits a change for the whole cluster, if this is the state directory of server 0."""
        marks.decide(self.path, change, size)

    def holds(self, change: str) -> bool:
        """Returns whether a change holds, if this is the state directory of server 0."""
        return marks.holds(self.path, change)

    def decided_size(self, cluster: str) -> DecidedSize | None:
        """Returns the size that a cluster has since its latest change, if this is the state directory of server 0."""
        return marks.decided_size(self.path, cluster)

    def cancel(self, change: str) -> None:
        """Ends a change that does not hold as if it had never begun."""
        mark = ResizeMark.read(self.path)
        if mark is not None and mark.id == change:
            self._undo()

    def settle(self, size: int) -> None:
        """Ends a change before the server of a cluster of a size starts: as it was decided, and not at all otherwise.

        Raises:
            StateError: The cluster has not the size that it has according to that, or nobody can tell.
        """
        mark = ResizeMark.read(self.path)
        if mark is None:
            return
        if self._asked(mark.id):
            if size != mark.after:
                raise StateError(
                    f"{self.path}: a change from {mark.before} to {mark.after} servers was decided: start the cluster "
                    f"with {mark.after} servers"
                )
            self._accept(mark)
        elif size == mark.before:
            self._undo()
        else:
            raise StateError(
                f"{self.path}: a change from {mark.before} to {mark.after} servers was interrupted: start the cluster "
                f"with {mark.before} servers, as before"
            )

    def _accept(self, mark: ResizeMark) -> None:
        with self._opened() as store:
            incoming = keys_of(store, incoming=True).keys()
            # Without any, all of them have got their places before this was interrupted.
            if incoming or not mark.incoming:
                if incoming != set(mark.incoming):
                    raise StateError(f"{self.path}: some of what has come with a change of its cluster is missing")
                _carry_out(store, acceptance(store, mark.outgoing))
        ResizeMark.remove(self.path)

    def _undo(self) -> None:
        with self._opened() as store:
            _carry_out(store, removal_of_incoming(store))
        ResizeMark.remove(self.path)

    @contextmanager
    def _opened(self) -> Iterator[StateStore]:
        store = StateStore(StateDirectory(self.path))
        try:
            yield store
        finally:
            store.close()


def _carry_out(store: StateStore, change: Change) -> None:
    _write(store, lambda: store.commit(change))


def _write(store: StateStore, work: Callable[[], Awaitable[None]]) -> None:
    """Runs what writes to a state directory, and returns when that survives a loss of power."""
    failures: list[str] = []

    async def write() -> None:
        store.start(failures.append)
        await work()

    asyncio.run(write())
    if failures:
        raise StateError(failures[0])
