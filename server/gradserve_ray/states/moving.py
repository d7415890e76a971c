"""Moves accumulators and parameters between the servers of a cluster that changes its size, and checks the result."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gradserve_ray.states.mark import DecidedSize, ResizeMark
from gradserve_ray.states.member_state import (
    AnnouncementError,
    Contents,
    MemberState,
    MoveError,
    PartDigests,
    UnknownOutcomeError,
)
from gradserve_ray.states.movable import Key
from gradserve_ray.states.redividing import PieceDigests, Redivision
from gradserve_ray.states.resharding import Resharding, reshardings
from gradserve_ray.states.shards import Division


@dataclass(frozen=True)
class Move:
    """An accumulator or parameters that get another home, or that are sharded over another number of servers.

    Attributes:
        key: Its name.
        source: The server that is its home.
        target: The server that will be.
        num_shards: The number of servers over which it will be sharded; 0 if it is on one as a whole.
    """

    key: Key
    source: int
    target: int
    num_shards: int = 0

    def __str__(self) -> str:
        if self.num_shards:
            return f"sharded over {self.num_shards} servers"
        if self.source == self.target:
            return f"as a whole on server {self.target}"
        return f"server {self.source} to {self.target}"


def moves_between(contents: Mapping[int, Contents], before: int, after: int) -> list[Move]:
    """Returns which whole accumulators and parameters move when a cluster gets another size.

    Args:
        contents: What each of its servers has.
        before: The number of servers.
        after: The number that it is to have.

    Raises:
        MoveError: An accumulator or parameters are not at their home, or a server that is to go has layers.
    """
    moves = []
    for index, found in sorted(contents.items()):
        if index >= after and found.num_layers:
            raise MoveError(
                f"server {index} has {found.num_layers} batch normalization layers, which do not move to another "
                "server: delete them"
            )
        for key in found.digests:
            if index >= before:
                raise MoveError(f"the state directory of server {index} has {key} already: empty it")
            if key in found.sharded or key in found.sharded_parameters:
                continue
            if (home := key.home(before)) != index:
                raise MoveError(f"server {index} has {key}, of which server {home} is the home")
            if (target := key.home(after)) != index:
                moves.append(Move(key, index, target))
    return moves


def move_resources(
    states: Sequence[MemberState],
    before: int,
    after: int,
    announce: Callable[[], object] = lambda: None,
    size: DecidedSize | None = None,
) -> list[Move]:
    """Moves accumulators and parameters whose home or servers change; checks that each arrives once, unchanged.

    No server may run during the move. When it returns, the change is committed: each server has to `settle` before it
    starts.

    The change is committed as soon as the state directory of server 0 says so, and is never undone: a server may have
    started since.

    Args:
        states: The state directories of the servers, of those that come and those that go too, in their order.
        before: The number of servers.
        after: The number that they are to be.
        announce: Called when the change holds.
        size: What server 0 notes with the decision; None for nothing.

    Returns:
        What has moved.

    Raises:
        MoveError: It was not possible, or something is not what it was; everything is as before.
        UnknownOutcomeError: The end of it failed, and server 0 could not be reached any more, which knows whether the
            change holds.
        AnnouncementError: `announce` has failed; the change holds.
    """
    change = secrets.token_hex(16)
    moving: _Moving | None = None
    interrupted: BaseException | None = None
    try:
        for each in states:
            each.settle(before)  # What an interrupted change has left where no server has started since.
        old = {index: each.contents() for index, each in enumerate(states)}
        divided = redivisions(old, before, after)
        were_late = [_bring_up_to_date(each, states, old) for each in divided]
        if any(were_late):
            old = {index: each.contents() for index, each in enumerate(states)}
            divided = redivisions(old, before, after)
        moving = _Moving(states, old, moves_between(old, before, after), reshardings(old, before, after), divided)
        moving.carry_out(change, before, after, size)
    except BaseException as error:
        if moving is None or not moving.may_be_decided or not _holds(states[0], change, before, after, error):
            _cancel(states, change)
            if isinstance(error, MoveError) or not isinstance(error, Exception):
                raise
            raise MoveError(str(error)) from error
        interrupted = None if isinstance(error, Exception) else error  # The decision was made, and its reply was lost.
    try:
        announce()
    except Exception as error:
        raise AnnouncementError(f"the cluster has {after} servers now, but: {error}") from error
    if interrupted is not None:
        raise interrupted
    shards = 0 if after == 1 else after
    divided_again: list[Resharding | Redivision] = [*moving.reshardings, *moving.redivisions]
    return [*moving.moves, *[Move(each.key, each.source, each.target, shards) for each in divided_again]]


def redivisions(contents: Mapping[int, Contents], before: int, after: int) -> list[Redivision]:
    """Returns the changes of all sharded parameters.

    Raises:
        MoveError: A server has lost its shard.
    """
    keys = sorted({key for found in contents.values() for key in found.sharded_parameters})
    found = []
    for key in keys:
        shards = {
            index: each.sharded_parameters[key] for index, each in contents.items() if key in each.sharded_parameters
        }
        if key.home(before) not in shards:
            continue  # An interrupted deletion has left it.
        each = Redivision.of(key, shards, before, after)
        if missing := each.before.rows.keys() - shards.keys():
            raise MoveError(f"server {min(missing)} has lost its shard of {key}: load a saved version, or delete them")
        found.append(each)
    return found


def _bring_up_to_date(each: Redivision, states: Sequence[MemberState], contents: Mapping[int, Contents]) -> bool:
    """Has servers make the versions of rounds that they have not heard of; returns whether there were any."""
    steps = {server: contents[server].sharded_parameters[each.key].step for server in each.before.rows}
    newest = steps[each.source]
    late = {server: step for server, step in steps.items() if step < newest}
    for server, step in late.items():
        states[server].follow(each.key, states[each.source].decided_since(each.key, step))
    return bool(late)


def _holds(first: MemberState, change: str, before: int, after: int, error: BaseException) -> bool:
    """Returns whether a change holds although committing it raised an error."""
    try:
        return first.holds(change)
    except Exception:
        raise UnknownOutcomeError(
            f"{error}; server 0, which knows whether the cluster has {before} or {after} servers now, cannot be "
            f"reached: end the cluster and start it with {after}, or with {before} if a server then says so"
        ) from error


class _Moving:
    """Moves accumulators to their new servers, and decides that the change holds.

    Attributes:
        may_be_decided: True once the change may hold.
    """

    def __init__(
        self,
        states: Sequence[MemberState],
        old: Mapping[int, Contents],
        moves: Sequence[Move],
        resharded: Sequence[Resharding],
        redivided: Sequence[Redivision],
    ) -> None:
        self.moves = moves
        self.reshardings = resharded
        self.redivisions = redivided
        self.may_be_decided = False
        self._states = states
        self._old = old

    def carry_out(self, change: str, before: int, after: int, size: DecidedSize | None) -> None:
        """Brings everything to its place beside what is there, checks it, and decides that it holds."""
        newest = max(each.newest_number for each in self._old.values())
        for index, state in enumerate(self._states[:after]):
            if self._old[index].newest_number < newest:  # It may be the home of what another one has made before.
                state.note_number(newest)
        outgoing, incoming = self._outgoing(), self._incoming()
        if not outgoing and not incoming:
            if size is not None:
                self._decide(change, size)
            return
        for index in sorted({0, *outgoing, *incoming}):  # Server 0 in any case: it has the decision.
            mark = ResizeMark(change, before, after, tuple(incoming.get(index, ())), tuple(outgoing.get(index, ())))
            self._states[index].begin(mark)
        for move in self.moves:
            self._states[move.target].add(self._states[move.source].read(move.key))
        for each in self.reshardings:
            digests = self._digests(each, each.before, incoming=False)
            self._reshard(each)
            self._check_parts(each, digests, self._digests(each, each.after, incoming=True))
        for divided in self.redivisions:
            self._redivide(divided)
        self._check(incoming)
        if after == 1:  # Sharding is over several servers: clients of one ask for a whole accumulator.
            for each in self.reshardings:
                self._states[0].make_whole(each.key)
        self._decide(change, size)

    def _decide(self, change: str, size: DecidedSize | None) -> None:
        self.may_be_decided = True
        self._states[0].decide(change, size)

    def _outgoing(self) -> dict[int, list[Key]]:
        """Returns what leaves each server: whole accumulators that move, and all shards, which may return."""
        found: dict[int, list[Key]] = defaultdict(list)
        for move in self.moves:
            found[move.source].append(move.key)
        for index, contents in self._old.items():
            found[index] += [*contents.sharded, *contents.sharded_parameters]
        return {index: keys for index, keys in found.items() if keys}

    def _incoming(self) -> dict[int, list[Key]]:
        found: dict[int, list[Key]] = defaultdict(list)
        for move in self.moves:
            found[move.target].append(move.key)
        for each in self.reshardings:
            for server in each.servers:
                found[server].append(each.key)
        for divided in self.redivisions:
            for server in divided.after.rows:
                found[server].append(divided.key)
        return found

    def _reshard(self, each: Resharding) -> None:
        """Sends each server its shard of an accumulator, in batches of gradients."""
        states, key = self._states, each.key
        for server in each.servers:
            states[server].add(states[each.source].read(key), each.spec, is_home=server == each.target)
        for parts in each.batches():
            for server, rows in each.after.rows.items():
                given = [
                    states[source].read_parts(key, list(parts), wanted)
                    for source in each.before.rows
                    if (wanted := each.before.wanted(source, rows))
                ]
                states[server].add_parts(key, parts, list(rows), *given)

    def _redivide(self, each: Redivision) -> None:
        """Sends each server its shard of parameters, and checks that the digests of all rows are unchanged."""
        states, key = self._states, each.key
        before: PieceDigests = {}
        for source, rows in each.before.rows.items():
            before |= states[source].piece_digests(key, rows, each.cuts, incoming=False)
        outline = states[each.source].outline(key)
        after: PieceDigests = {}
        for server, rows in each.after.rows.items():
            given = [
                states[source].read_pieces(key, wanted)
                for source in each.before.rows
                if (wanted := each.before.wanted(source, rows))
            ]
            states[server].add_shard(each, server, outline, *given)
            after |= states[server].piece_digests(key, rows, each.cuts, incoming=True)
        for place in before.keys() | after.keys():
            if before.get(place) != after.get(place):
                slot, name, start = place
                what = f"slot {slot!r} of component {name!r}" if slot else f"component {name!r}"
                raise MoveError(
                    f"{key} are not what they were: the digest of {what} from row {start} on is "
                    f"{after.get(place, 'missing')[:16]}, and was {before.get(place, 'missing')[:16]} before"
                )

    def _digests(self, each: Resharding, division: Division, *, incoming: bool) -> PartDigests:
        """Returns digests of all rows of the gradients that are held for an accumulator."""
        found: PartDigests = {part: {} for part in each.parts}
        for server, rows in division.rows.items():
            digests = self._states[server].part_digests(each.key, list(each.parts), rows, each.cuts, incoming=incoming)
            for part, of_rows in digests.items():
                found[part] |= of_rows
        return found

    def _check_parts(self, each: Resharding, before: PartDigests, after: PartDigests) -> None:
        """Checks that the digests of all rows of gradients are unchanged."""
        for part, digests in before.items():
            for (name, start), digest in digests.items():
                there = after[part].get((name, start))
                if there != digest:
                    raise MoveError(
                        f"gradient {part.id[:16]} of {each.key} is not what it was: the digest "
                        f"of component {name!r} from row {start} on is {(there or 'missing')[:16]}, and was "
                        f"{digest[:16]} before"
                    )
        if before.keys() != after.keys() or any(before[part].keys() != after[part].keys() for part in before):
            raise MoveError(f"{each.key} has got more gradients than it had")

    def _check(self, incoming: Mapping[int, Collection[Key]]) -> None:
        """Checks by digests that each server still has its accumulators, and has received those that move to it."""
        expected: dict[int, dict[Key, str]] = defaultdict(dict)
        for move in self.moves:
            expected[move.target][move.key] = self._old[move.source].digests[move.key]
        for each in self.reshardings:
            expected[each.target][each.key] = self._old[each.source].digests[each.key]
        for index, state in enumerate(self._states):
            _check_digests(index, state.contents().digests, self._old[index].digests)
            come = state.contents(incoming=True)
            if come.digests.keys() != set(incoming.get(index, ())):
                raise MoveError(f"server {index} has not received what it should have, but: {sorted(come.digests)}")
            _check_digests(index, come.digests, expected[index])
            for each in self.reshardings:
                found = come.sharded.get(each.key)
                if found is not None and (found.spec != each.spec or found.parts.keys() - each.parts.keys()):
                    raise MoveError(f"{each.key} has not come to server {index} as planned")


def _check_digests(index: int, found: Mapping[Key, str], expected: Mapping[Key, str]) -> None:
    for key, digest in expected.items():
        if (there := found.get(key)) != digest:
            raise MoveError(
                f"{key} of server {index} is not what it was: its digest is "
                f"{(there or 'missing')[:16]}, and was {digest[:16]} before"
            )


def _cancel(states: Iterable[MemberState], change: str) -> None:
    """Undoes an uncommitted change on all servers that can be reached now."""
    for each in states:
        with suppress(Exception):
            each.cancel(change)
