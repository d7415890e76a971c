"""Changes the number of servers of a cluster, between rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import get_placement_group, placement_group_table

from gradserve.discovery.ray import directory_name
from gradserve_ray.cluster import (
    MemberPlace,
    end_members,
    give_back,
    kill,
    reserve,
    start_member,
    wait_until_running,
)
from gradserve_ray.directory import ClusterError, ClusterPlan
from gradserve_ray.local_ray import LOOPBACK
from gradserve_ray.member import REPLY_SECONDS, directory_of, find_actor, member_name
from gradserve_ray.states.mark import DecidedSize
from gradserve_ray.states.member_state import (
    AnnouncementError,
    MemberState,
    MoveError,
    UnknownOutcomeError,
)
from gradserve_ray.states.moving import Move, move_resources
from gradserve_server.accumulators.round_hold import HeldRounds

_LOOK_SECONDS = 0.1
_MOST_NAMED = 10


@dataclass(frozen=True)
class Resized:
    """A cluster that has changed its size.

    Attributes:
        before: The number of servers before.
        moves: The accumulators and parameters that have moved, whose digests are what they were.
        lost: Those of durability none that have ended.
        addresses: The addresses of the servers now, in their order.
    """

    before: int
    moves: tuple[Move, ...]
    lost: tuple[str, ...]
    addresses: tuple[str, ...]


def resize_cluster(name: str, servers: int, timeout: float, *, drop_volatile: bool) -> Resized:
    """Changes the number of servers of a cluster on the Ray that this process is connected to.

    Holds new rounds, waits until none is open, stops the servers, moves what gets another home, and starts as many
    servers as there are to be. If anything fails before server 0 has decided, the servers that there were go on with
    what they had; afterwards, whatever fails, those of the new size do.

    Args:
        name: The name of the cluster.
        servers: The number that there are to be.
        timeout: Seconds that rounds have to end, and then servers to stop, and then to serve.
        drop_volatile: Whether accumulators and parameters of durability none may end; otherwise they are an error.

    Raises:
        ClusterError: There is no such cluster, it has as many servers, Ray has no room for more, rounds do not end,
            something would be lost or could not be moved, or the new servers do not serve in time.
    """
    directory = directory_of(name)
    plan: ClusterPlan | None = ray.get(directory.plan.remote(), timeout=REPLY_SECONDS)
    assert plan is not None, "`start_cluster` gives one"
    before, epoch = _size_now(directory, plan)
    if servers == before:
        raise ClusterError(f"cluster {name!r} has {before} servers already")
    local_ray = ray.get(directory.local_ray.remote(), timeout=REPLY_SECONDS)
    place = MemberPlace(plan, directory, LOOPBACK if local_ray else None)
    members = [_member(name, index) for index in range(before)]
    change = _Change(servers)
    with (
        _added(place, before, timeout, change) as added,
        _held(members, timeout, drop_volatile=drop_volatile) as lost,
        _stopped(members, added, directory, timeout, change),
    ):
        states = [cast(MemberState, _RemoteState(each)) for each in (*members, *added)]

        def announce() -> None:
            change.is_decided = True
            _announce(directory, servers, epoch + 1, time.monotonic() + timeout)

        moves = move_resources(states, before, servers, announce, DecidedSize(plan.id, epoch + 1, servers))
    _forget(name, members[servers:], servers, before)
    everyone = [*members[:servers], *added]
    ray.get([each.start.remote() for each in everyone], timeout=REPLY_SECONDS)
    wait_until_running(directory, timeout, time.monotonic() + timeout)
    addresses = ray.get(directory.addresses.remote(), timeout=REPLY_SECONDS)
    return Resized(before, tuple(moves), lost, tuple(addresses))


@dataclass
class _Change:
    """A change of the size that is under way.

    Attributes:
        servers: The number of servers that there are to be.
        is_decided: Whether the change holds: from then on, nothing goes back.
    """

    servers: int
    is_decided: bool = False


def _size_now(directory: Any, plan: ClusterPlan) -> tuple[int, int]:
    """Returns the number of servers, and how often it has changed.

    The directory learns of a change that was decided, and whose command has ended before it said so; its servers start.
    """
    decided: DecidedSize | None = None
    first = find_actor(member_name(plan.name, 0))
    with suppress(RayError):  # A command that changes the size needs server 0, and reports that itself.
        decided = first and ray.get(first.decided_size.remote(), timeout=REPLY_SECONDS)
    epoch: int = ray.get(directory.epoch.remote(), timeout=REPLY_SECONDS)
    if decided is not None and decided.epoch > epoch:
        _announce(directory, decided.servers, decided.epoch, time.monotonic())
        epoch = decided.epoch
        members = [find_actor(member_name(plan.name, index)) for index in range(decided.servers)]
        ray.get([each.start.remote() for each in members if each is not None], timeout=REPLY_SECONDS)
    size: int = ray.get(directory.size.remote(), timeout=REPLY_SECONDS)
    return size, epoch


def _announce(directory: Any, servers: int, epoch: int, end: float) -> None:
    """Tells the directory the size of the cluster, again until it answers: a reply that is late says nothing."""
    while True:
        try:
            ray.get(directory.resize.remote(servers, epoch), timeout=REPLY_SECONDS)
        except GetTimeoutError:
            if time.monotonic() > end:
                raise
        else:
            return


def _member(name: str, index: int) -> Any:
    member = find_actor(member_name(name, index))
    if member is None:
        raise ClusterError(f"cluster {name!r} has no actor for server {index}; `gradserve cluster status` shows it")
    return member


@contextmanager
def _added(place: MemberPlace, before: int, timeout: float, change: _Change) -> Iterator[list[Any]]:
    """Starts the actors of further servers, which do not start these yet.

    Ends them if the block fails before the change is decided.
    """
    name = place.plan.name
    end_members(name, before)
    groups: list[str] = []
    actors: list[Any] = []
    try:
        original = get_placement_group(directory_name(name))
        num_bundles = len(placement_group_table(original)["bundles"])
        for index in range(before, change.servers):
            if index < num_bundles:  # It was one of the first ones, before the cluster became smaller.
                actors.append(start_member(place, index, original, index))
                continue
            groups.append(member_name(name, index))
            group = reserve(place.plan, 1, groups[-1])
            actors.append(start_member(place, index, group, 0))
        _answered([each.on_state.remote("contents") for each in actors], timeout, "further servers")
        yield actors
    except BaseException:
        if not change.is_decided:
            for each in actors:
                kill(each)
            for group_name in groups:
                give_back(group_name)
        raise


@contextmanager
def _held(members: Sequence[Any], timeout: float, *, drop_volatile: bool) -> Iterator[tuple[str, ...]]:
    """Holds rounds until no server has an open one; lets them begin again if that or the block fails.

    Gives the accumulators and parameters that end with their servers.
    """
    try:
        yield _wait_for_rounds(members, timeout, drop_volatile=drop_volatile)
    except BaseException:
        with suppress(RayError):
            ray.get([each.release_rounds.remote() for each in members], timeout=REPLY_SECONDS)
        raise


def _wait_for_rounds(members: Sequence[Any], timeout: float, *, drop_volatile: bool) -> tuple[str, ...]:
    end = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        found: list[HeldRounds | None] = _answered(
            [each.hold_rounds.remote() for each in members], REPLY_SECONDS, "servers"
        )
        known = [each for each in found if each is not None]
        # Once each: those that are sharded are on several servers.
        volatile = tuple(dict.fromkeys(name for each in known for name in each.volatile))
        if volatile and not drop_volatile:
            raise ClusterError(
                f"accumulators or parameters of durability none, which would be lost: {_some(volatile)}; delete them, "
                "or let them end with --drop-volatile"
            )
        still_open = {name: count for each in known for name, count in each.open.items()}
        if len(known) == len(members) and not still_open:
            return volatile
        if time.monotonic() > end:
            silent = [str(index) for index, each in enumerate(found) if each is None]
            if silent:
                raise ClusterError(f"servers that do not hold rounds within {timeout:g} s: {', '.join(silent)}")
            rounds = [f"{name} ({count} gradients)" for name, count in still_open.items()]
            raise ClusterError(f"rounds that are still open after {timeout:g} s: {_some(rounds)}")
        pause.wait(_LOOK_SECONDS)


@contextmanager
def _stopped(
    members: Sequence[Any], added: Sequence[Any], directory: Any, timeout: float, change: _Change
) -> Iterator[None]:
    """Stops the servers; if the block fails, starts those that the cluster has then, and waits until they serve."""
    try:
        _stop(members, timeout)
        yield
    except BaseException as error:
        there = [*members, *added][: change.servers] if change.is_decided else members
        with suppress(
            RayError, ClusterError
        ):  # What has happened before is what counts; `cluster status` shows the rest.
            ray.get([each.start.remote() for each in there], timeout=REPLY_SECONDS)
            wait_until_running(directory, timeout, time.monotonic() + timeout)
        if isinstance(error, UnknownOutcomeError):
            raise ClusterError(str(error)) from error
        if isinstance(error, AnnouncementError):
            raise ClusterError(
                f"{error}; they start as soon as the directory answers, as `gradserve cluster status` shows"
            ) from error
        if isinstance(error, MoveError | RayError):
            raise ClusterError(f"{error}; the cluster goes on with {len(members)} servers, as before") from error
        raise


def _stop(members: Sequence[Any], timeout: float) -> None:
    stopped = _answered([each.stop.remote(timeout) for each in members], timeout + REPLY_SECONDS, "servers")
    if not all(stopped):
        late = [str(index) for index, each in enumerate(stopped) if not each]
        raise ClusterError(f"servers that have not stopped within {timeout:g} s: {', '.join(late)}")


def _forget(name: str, removed: Sequence[Any], servers: int, before: int) -> None:
    """Ends the actors of servers that are gone, after what has moved was removed from their state directories."""
    with suppress(RayError):  # What is left is removed when such a server comes back.
        ray.get([each.on_state.remote("settle", servers) for each in removed], timeout=REPLY_SECONDS)
    for each in removed:
        kill(each)
    for index in range(servers, before):
        give_back(member_name(name, index))


def _answered(references: list[Any], timeout: float, who: str) -> list[Any]:
    try:
        answers: list[Any] = ray.get(references, timeout=timeout)
    except RayTaskError as error:
        raise ClusterError(str(error.cause)) from error
    except RayError as error:
        raise ClusterError(f"{who} do not answer: {error}") from error
    return answers


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


_REFERENCES = ("read", "read_parts", "read_pieces", "outline")
"""The methods of which `_RemoteState` returns references."""


class _RemoteState:
    """Has the methods of an actor's `MemberState`.

    `_REFERENCES` return references: what moves goes from actor to actor, not through this process.
    """

    def __init__(self, member: Any) -> None:
        self._member = member

    def __getattr__(self, method: str) -> Callable[..., Any]:
        ask = partial(self._member.on_state.remote, method)
        return ask if method in _REFERENCES else lambda *args, **options: _reply(ask(*args, **options))


def _reply(reference: Any) -> Any:
    """Returns the answer of an actor, however long it takes."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise MoveError(str(error.cause)) from error  # Its own text has the stack of the actor.
