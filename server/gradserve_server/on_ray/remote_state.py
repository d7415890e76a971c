"""The state directory of a server, in its actor."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from gradserve_server.accumulators.durable.movable import Key, Rows
from gradserve_server.accumulators.journal import PartKey, Staged
from gradserve_server.resizing.errors import MoveError
from gradserve_server.resizing.mark import DecidedSize, ResizeMark
from gradserve_server.resizing.member_state import Contents, PartDigests


class RemoteState:
    """See `StateAccess`. Accumulators go from one actor to another, past this process."""

    def __init__(self, member: Any) -> None:
        """Takes the handle of the actor."""
        self._member = member

    def contents(self, *, incoming: bool = False) -> Contents:
        """See `MemberState`."""
        found: Contents = _reply(self._member.contents.remote(incoming=incoming))
        return found

    def read(self, key: Key) -> Any:
        """Returns a reference to what `MemberState` returns."""
        return self._member.read.remote(key)

    def read_parts(self, key: Key, parts: Collection[PartKey], wanted: Mapping[str, tuple[int, Rows]]) -> Any:
        """Returns a reference to what `MemberState` returns."""
        return self._member.read_parts.remote(key, parts, wanted)

    def part_digests(
        self,
        key: Key,
        parts: Collection[PartKey],
        held: Mapping[str, Rows],
        cuts: Mapping[str, Collection[int]],
        *,
        incoming: bool,
    ) -> PartDigests:
        """See `MemberState`."""
        found: PartDigests = _reply(self._member.part_digests.remote(key, parts, held, cuts, incoming=incoming))
        return found

    def note_number(self, number: int) -> None:
        """See `MemberState`."""
        _reply(self._member.note_number.remote(number))

    def begin(self, mark: ResizeMark) -> None:
        """See `MemberState`."""
        _reply(self._member.begin.remote(mark))

    def add(self, moved: Any, spec: str | None = None, *, is_home: bool = True) -> None:
        """See `MemberState`."""
        _reply(self._member.add.remote(moved, spec, is_home=is_home))

    def add_parts(self, key: Key, parts: Mapping[PartKey, Staged], names: Sequence[str], *given: Any) -> None:
        """See `MemberState`."""
        _reply(self._member.add_parts.remote(key, parts, names, *given))

    def make_whole(self, key: Key) -> None:
        """See `MemberState`."""
        _reply(self._member.make_whole.remote(key))

    def decide(self, change: str, size: DecidedSize | None = None) -> None:
        """See `MemberState`."""
        _reply(self._member.decide.remote(change, size))

    def holds(self, change: str) -> bool:
        """See `MemberState`."""
        holds: bool = _reply(self._member.holds.remote(change))
        return holds

    def cancel(self, change: str) -> None:
        """See `MemberState`."""
        _reply(self._member.cancel.remote(change))

    def settle(self, size: int) -> None:
        """See `MemberState`."""
        _reply(self._member.settle.remote(size))


def _reply(reference: Any) -> Any:
    """Returns the answer of an actor, however long it takes."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise MoveError(str(error.cause)) from error  # Its own text has the stack of the actor.
