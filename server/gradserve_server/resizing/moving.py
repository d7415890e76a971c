"""Moves accumulators between the servers of a cluster that changes its size, and checks by digests what has moved."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gradserve.wire.homes import home_of
from gradserve_server.accumulators.durable.moving import Key
from gradserve_server.resizing.mark import ResizeMark
from gradserve_server.resizing.member_state import Contents


class MoveError(Exception):
    """Accumulators could not be moved; every server has what it had before."""


class StateAccess(Protocol):
    """A `MemberState`, wherever it is. What `read` returns goes to `add` of another one, and is not looked into."""

    def contents(self) -> Contents:
        """See `MemberState`."""

    def read(self, key: Key) -> Any:
        """See `MemberState`."""

    def begin(self, mark: ResizeMark) -> None:
        """See `MemberState`."""

    def add(self, moved: Any) -> None:
        """See `MemberState`."""

    def decide(self) -> None:
        """See `MemberState`."""

    def cancel(self) -> None:
        """See `MemberState`."""


@dataclass(frozen=True)
class Move:
    """An accumulator that gets another home.

    Attributes:
        key: Its container and name.
        source: The server that has it.
        target: The server that gets it.
    """

    key: Key
    source: int
    target: int


def moves_between(contents: Mapping[int, Contents], before: int, after: int) -> list[Move]:
    """Returns which accumulators move when a cluster gets another size.

    Args:
        contents: What each of its servers has.
        before: The number of servers.
        after: The number that it is to have.

    Raises:
        MoveError: An accumulator is sharded, or not at its home; or a server that is to go has layers.
    """
    sharded = sorted({"/".join(key) for found in contents.values() for key in found.sharded})
    if sharded:
        raise MoveError(
            f"sharded accumulators cannot get another number of servers: {', '.join(map(repr, sharded))}; delete them, "
            "and make them again afterwards"
        )
    moves = []
    for index, found in sorted(contents.items()):
        if index >= after and found.num_layers:
            raise MoveError(
                f"server {index} has {found.num_layers} batch normalization layers, which do not move to another "
                "server: delete them"
            )
        for container, name in found.digests:
            if index >= before:
                raise MoveError(
                    f"the state directory of server {index} has accumulator '{container}/{name}' already: empty it"
                )
            if (home := home_of(container, name, before)) != index:
                raise MoveError(f"accumulator '{container}/{name}' is on server {index}, and belongs to server {home}")
            if (target := home_of(container, name, after)) != index:
                moves.append(Move((container, name), index, target))
    return moves


def move_accumulators(states: Sequence[StateAccess], before: int, after: int) -> list[Move]:
    """Moves what gets another home, and checks that everything is there, once, as it was; returns what has moved.

    No server runs meanwhile. When it returns, the change holds: each server has to `settle` before it starts.

    Args:
        states: The state directories of the servers, of those that come and those that go too, in their order.
        before: The number of servers.
        after: The number that they are to be.

    Raises:
        MoveError: It was not possible, or something is not what it was; everything is as before.
    """
    try:
        old = {index: each.contents() for index, each in enumerate(states)}
        moves = moves_between(old, before, after)
        _move(states, moves, old, before, after)
    except MoveError:
        cancel_everywhere(states)
        raise
    except BaseException as error:
        cancel_everywhere(states)
        if not isinstance(error, Exception):
            raise
        raise MoveError(str(error)) from error
    return moves


def _move(
    states: Sequence[StateAccess], moves: Sequence[Move], old: Mapping[int, Contents], before: int, after: int
) -> None:
    incoming: dict[int, list[Key]] = defaultdict(list)
    outgoing: dict[int, list[Key]] = defaultdict(list)
    for move in moves:
        incoming[move.target].append(move.key)
        outgoing[move.source].append(move.key)
    involved = sorted({*incoming, *outgoing})
    for index in involved:
        states[index].begin(ResizeMark(before, after, tuple(incoming[index]), tuple(outgoing[index])))
    for move in moves:
        states[move.target].add(states[move.source].read(move.key))
    _check({index: each.contents() for index, each in enumerate(states)}, old, moves)
    # What comes first: until it holds where accumulators go to, it does not where they come from.
    for index in sorted(involved, key=lambda index: not incoming[index]):
        states[index].decide()


def _check(found: Mapping[int, Contents], old: Mapping[int, Contents], moves: Sequence[Move]) -> None:
    """Checks that each server has what it had, and what has come, with the same digests."""
    expected = {index: dict(contents.digests) for index, contents in old.items()}
    for move in moves:
        expected[move.target][move.key] = old[move.source].digests[move.key]
    for index, digests in expected.items():
        for key, digest in digests.items():
            name, there = "/".join(key), found[index].digests.get(key)
            if there != digest:
                raise MoveError(
                    f"accumulator '{name}' of server {index} is not what it was: its digest is "
                    f"{(there or 'missing')[:16]}, and was {digest[:16]} before"
                )


def cancel_everywhere(states: Sequence[StateAccess]) -> None:
    """Ends the change everywhere as if it had never begun, as far as servers can be reached."""
    for each in states:
        try:
            each.cancel()
        except Exception:
            continue
