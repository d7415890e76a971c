"""Makes what works in rounds, accumulators and others, out of the parts of this package and within the budgets."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np

from gradserve_server.accumulators.averages import AverageHistory, KeptAverages, KeptBytes, UndeliveredAverages
from gradserve_server.accumulators.changes import MemberBytes, RoundChanges
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.identity import CallMemory
from gradserve_server.accumulators.journal import FileJournal
from gradserve_server.accumulators.ledger import Answer, Ledger
from gradserve_server.accumulators.places.place import AllocateAverage, Place, Places
from gradserve_server.accumulators.rounds import OF_ACCUMULATORS, AccumulatorObserver, RoundGate, Unobserved, Wording
from gradserve_server.accumulators.sharding.home import Decision
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.round_sum import AverageMemory, RoundSum
from gradserve_server.accumulators.sums.summation import Summation, make_summation
from gradserve_server.accumulators.waits import TakeQueue
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Deadlines, Turn
from gradserve_server.security.identity import Identity, ShareRules
from gradserve_server.storage.journal import Durability


@dataclass(frozen=True)
class OwnReservations:
    """The reservations of one accumulator, which count for its creator and its container, too.

    Its parts make their own ones of `memory`, `host_memory`, `bookkeeping` and `waiters`.

    Attributes:
        memory: Bytes of sums, held gradients and averages, in the accumulator's place.
        host_memory: Bytes on the host; the same as `memory` if the host is its place.
        bookkeeping: Bytes of memory beside tensors; of the accumulator itself.
        count: The one accumulator.
        waiters: The number of waiting calls.
    """

    memory: Reservation
    host_memory: Reservation
    bookkeeping: Reservation
    count: Reservation
    waiters: Reservation

    def close(self) -> None:
        """Counts one accumulator less."""
        self.count.settle(0)
        self.bookkeeping.settle(0)


_ACCUMULATOR_BYTES = 12 << 10
"""The measured memory of an accumulator without components."""
_WAITER_BYTES = 12 << 10
"""The measured memory of a waiting call."""
_RETRY_SECONDS = 0.5

Forget: TypeAlias = Callable[[Collection[int]], None]
"""Called with the numbers of rounds whose averages are no longer kept."""


@dataclass(frozen=True)
class RoundKind:
    """The parts in which resources that work in rounds differ.

    Attributes:
        ledger: Decides which gradients count.
        queue: Holds the waiting calls, and says when a round ends.
        summation: Makes the arithmetic of the sum for a spec in a place.
        keep: Makes the history of averages, given the arguments of `KeptAverages`.
        wording: What messages call it.
        observe: Returns the observer of a new one; None for that of accumulators.
        holds_gradients: Whether the gradients of a round are held until it ends, whatever the spec says.
        decision: Names the members of each round, for servers that hold their values. None: that of the accumulator, if
            it is sharded.
        shard: Holds gradients of a sharded resource until they count. None: that of the accumulator, if it is sharded.
    """

    ledger: Ledger
    queue: TakeQueue
    summation: Callable[[AccumulatorSpec, Place], Summation] = make_summation
    keep: Callable[..., KeptAverages] = KeptAverages
    wording: Wording = OF_ACCUMULATORS
    observe: Callable[[ResourceKey], AccumulatorObserver] | None = None
    holds_gradients: bool = False
    decision: Decision | None = None
    shard: Shard | None = None


class AccumulatorFactory:
    """Makes the machines of a server's accumulators, and counts them and their waiting calls.

    Attributes:
        places: Where accumulators can be.
        gate: Lets rounds of all of them begin, or holds them.
        bookkeeping: The budget of memory beside tensors.
        count: The budget of accumulators.
        waiters: The budget of waiting calls.
        clock: The clock of leases, in seconds.
    """

    def __init__(
        self,
        *,
        places: Places,
        bookkeeping: Budget,
        limits: LimitsConfig,
        lifetimes: Lifetimes,
        make_average_memory: Callable[[], AverageMemory | None] = lambda: None,
        observe: Callable[[ResourceKey], AccumulatorObserver] = lambda _: Unobserved(),
        member: Member | None = None,
    ) -> None:
        """`member` is the place of the server in a cluster; None without one."""
        self.places = places
        self.gate = RoundGate()
        self.bookkeeping = bookkeeping
        self.clock = lifetimes.clock
        self._limits = limits
        self._client_lease_seconds = lifetimes.client_lease_seconds
        self._make_average_memory = make_average_memory
        self._observe = observe
        self._member = member
        self._expiries: Deadlines[KeptAverages] = Deadlines()
        rules = bookkeeping.rules or ShareRules()
        self.count = Budget(
            limits.max_accumulators,
            "accumulators",
            rules,
            cost=(bookkeeping, _ACCUMULATOR_BYTES),
            of_container=lambda limits: limits.max_accumulators,
        )
        self.waiters = Budget(
            limits.max_waiters,
            "waiting calls",
            rules,
            cost=(bookkeeping, _WAITER_BYTES),
            of_identity=lambda limits: limits.max_waiters,
            of_container=lambda limits: limits.max_waiters,
            retry_after=_RETRY_SECONDS,
            code="GS_WAITING_CALLS",
        )

    def reserve(self, key: ResourceKey, spec: AccumulatorSpec, place: Place) -> OwnReservations:
        """Counts another accumulator.

        Raises:
            ResourceExhaustedError: The server or the container has reached its limit of accumulators.
        """
        creator, container = key.user, key.container
        own = OwnReservations(
            memory=place.reserve(creator, container),
            host_memory=self.places.host.reserve(creator, container),
            bookkeeping=self.bookkeeping_of(key),
            count=self.count.reserve(1, owner=creator, container=container),
            waiters=self.waiters.reserve(container=container),  # the caller's share is counted by its service
        )
        try:
            own.bookkeeping.grow(_names_bytes(key) + spec.bookkeeping_bytes)
        except BaseException:
            own.close()
            raise
        return own

    def bookkeeping_of(self, key: ResourceKey) -> Reservation:
        """Returns an empty reservation of bookkeeping for an accumulator of this name and creator."""
        return self.bookkeeping.reserve(owner=key.user, container=key.container)

    def new_call_memory(self, bookkeeping: Reservation) -> CallMemory[Answer]:
        """Returns an empty memory of calls for one accumulator, which counts for the holder of a reservation."""
        return CallMemory(
            window=self._limits.id_window,
            max_clients=self._limits.max_clients,
            silence=self._limits.client_memory_seconds,
            clock=self.clock,
            bookkeeping=bookkeeping,
        )

    def make_changes(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        place: Place,
        incarnation: str,
        kind: RoundKind,
        journal: FileJournal | None,
        own: OwnReservations,
    ) -> RoundChanges:
        """Returns what changes the rounds of an accumulator, with an empty sum and without averages.

        Args:
            key: Its name.
            spec: Its properties.
            place: Where it is.
            incarnation: An id that no other accumulator of the same name has.
            kind: Its ledger, queue, arithmetic and history.
            journal: Takes its changes; None if nothing is durable.
            own: Its reservations.
        """
        average_memory = self._make_average_memory()
        holds_gradients = spec.deterministic or kind.holds_gradients

        def make_sum(spec: AccumulatorSpec, make_room: Callable[[], bool]) -> RoundSum:
            return RoundSum(
                spec,
                place,
                kind.summation(spec, place),
                memory=own.memory,
                owner=key.user,
                make_room=make_room,
                average_memory=average_memory if place is self.places.host else None,
            )

        copies = place.average_copies(own.host_memory, self._allocate_averages(average_memory))
        kept = KeptBytes()
        undelivered = UndeliveredAverages(self._limits.undelivered_lease_seconds, self.clock, kept)
        history = AverageHistory(spec.keep_averages, kept, kind.wording)
        decision = Decision(incarnation, spec.deterministic) if spec.num_shards else kind.decision
        forget: Forget = (lambda _: None) if journal is None else journal.forget
        averages = kind.keep(history, undelivered, kept, own.memory, copies, self._expiries.add, forget, decision)
        return RoundChanges(
            ledger=kind.ledger,
            queue=kind.queue,
            round_sum=make_sum(spec.without_components() if spec.num_shards else spec, averages.make_room),
            averages=averages,
            journal=None if journal is None else place.journal(journal, spec.durability, own.host_memory),
            member_bytes=MemberBytes(own.bookkeeping, kind.ledger, holds_gradients=holds_gradients),
            gate=self.gate,
            observer=(kind.observe or self._observe)(key),
            shard=kind.shard or self._shard(key, spec, make_sum, own, journal),
        )

    def _shard(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        make_sum: Callable[[AccumulatorSpec, Callable[[], bool]], RoundSum],
        own: OwnReservations,
        journal: FileJournal | None,
    ) -> Shard | None:
        """Returns this server's shard of an accumulator; None if it has none."""
        shard = None if self._member is None else spec.shard(self._member.index)
        if shard is None:
            return None
        is_held = spec.deterministic or spec.durability is not Durability.NONE
        return Shard(
            str(key),
            shard,
            make_sum=partial(make_sum, shard, lambda: False),
            make_running_sum=None if is_held else partial(make_sum, shard.in_order(of_workers=False), lambda: False),
            memory=own.memory,
            bookkeeping=own.bookkeeping,
            journal=None if journal is None else journal.shard,
            clock=self.clock,
            call_seconds=self._client_lease_seconds,
        )

    def _allocate_averages(self, average_memory: AverageMemory | None) -> AllocateAverage:
        """Returns the allocator of averages on the host, in shared memory if others read them in place."""
        allocate = self.places.host.allocate

        def arrays(specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
            found = None
            if average_memory is not None:
                with suppress(MemoryError, ResourceExhaustedError):
                    found = average_memory.arrays(specs)
            return [allocate(*each) for each in specs] if found is None else found

        return arrays

    def waiting(self, user: Identity) -> AbstractContextManager[object]:
        """Counts a call that may wait, for its user; the accumulator counts it for its container.

        Raises:
            ResourceExhaustedError: Too many calls of the caller wait.
        """
        if not user.name:
            return _NOBODY
        waiting = self.waiters.reserve(owner=user)
        waiting.expect(1)
        return waiting

    def expire(self, turn: Turn) -> int:
        """Releases averages kept for calls whose lease has ended, in one turn; returns the number of calls."""
        now, count = self.clock(), 0
        while self._expiries.is_due(now) and turn.look():
            count += self._expiries.pop().expire(turn)
        return count


_NOBODY = nullcontext()
"""Counts nothing: somebody without a name may have any number of calls that wait."""


def _names_bytes(key: ResourceKey) -> int:
    """Returns the memory of the names of an accumulator, which are stored several times."""
    return 4 * (getsizeof(key.container) + getsizeof(key.name))
