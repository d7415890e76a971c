"""The accumulators of a server, by container and name."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.averages import AverageHistory, KeptAverages, KeptBytes, UndeliveredAverages
from gradserve_server.accumulators.changes import MemberBytes, RoundChanges
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.identity import CallMemory
from gradserve_server.accumulators.journal import AccumulatorJournals, FileJournal
from gradserve_server.accumulators.ledger import Answer, Ledger
from gradserve_server.accumulators.observer import AccumulatorObserver, Unobserved
from gradserve_server.accumulators.places.place import AllocateAverage, Place, Places
from gradserve_server.accumulators.rounds import RoundGate
from gradserve_server.accumulators.sharding.home import (
    Decision,
    OrderedIncarnations,
    PartIncarnations,
    is_incarnation,
    is_later,
    latest_before,
)
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.round_sum import AverageMemory, RoundSum
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.cluster import Member, check_place
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import Directory, ResourceKey
from gradserve_server.runtime.timing import Deadlines, Turn
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.security.shares import ShareRules
from gradserve_server.storage.journal import Durability, durability_of_new


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

MakeSum: TypeAlias = Callable[[AccumulatorSpec, Callable[[], bool]], RoundSum]
"""Makes a sum for a spec, given a function that frees memory when there is too little."""


class AccumulatorRegistry:
    """The accumulators of a server: creates, finds and deletes them.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        *,
        places: Places,
        bookkeeping: Budget,
        limits: LimitsConfig,
        lifetimes: Lifetimes,
        new_incarnation: Callable[[], str],
        journals: AccumulatorJournals | None = None,
        make_average_memory: Callable[[], AverageMemory | None] = lambda: None,
        wall_clock: Callable[[], int] = time.time_ns,
        is_of_another_run: Callable[[str], bool] = lambda _: False,
        observe: Callable[[ResourceKey], AccumulatorObserver] = lambda _: Unobserved(),
        member: Member | None = None,
    ) -> None:
        """Takes, among others, what makes incarnations and observers, and the journals if there is a state directory.

        `wall_clock` has the nanoseconds since 1970. The limits of accumulators and waiting calls have the rules of
        `bookkeeping`.

        `member` is the place of the server in a cluster, whose other servers have accumulators of other names.
        """
        self.gate = RoundGate()
        """Lets rounds of all accumulators begin, or holds them."""
        self._member = member
        rules = bookkeeping.rules or ShareRules()
        self._places = places
        self._make_average_memory = make_average_memory
        self._limits = limits
        self._clock = lifetimes.clock
        self._client_lease_seconds = lifetimes.client_lease_seconds
        self._new_incarnation = new_incarnation
        self._ordered = OrderedIncarnations(lambda: self._new_incarnation(), wall_clock, journals)
        self._parts = PartIncarnations(member)
        self._journals = journals
        self._observe = observe
        self._accumulators: Directory[Accumulator] = Directory(
            "accumulator", lifetimes, self._end, is_of_another_run=is_of_another_run
        )
        self._expiries: Deadlines[KeptAverages] = Deadlines()
        self.bookkeeping = bookkeeping
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
        )
        self._reservations: dict[ResourceKey, OwnReservations] = {}

    def create(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime = SHARED, home_incarnation: str = ""
    ) -> tuple[Accumulator, bool]:
        """Returns the accumulator of this name, and whether it is new.

        Args:
            key: Its name.
            spec: Its properties.
            lifetime: Its lifetime.
            home_incarnation: If another server is its home, the incarnation there, which it gets here, too. It replaces
                an earlier one.

        Raises:
            InvalidArgumentError: The name is empty, or belongs to another server of the cluster; or the incarnation at
                the home is missing, or given to the home.
            AbortedError: A later incarnation at the home is known here.
            AlreadyExistsError: An accumulator of this name has another spec or lifetime.
            ResourceExhaustedError: The server or the container has reached its limit of accumulators.
        """
        spec = self._places.named(_durable(spec))
        self._parts.check_creation(key, spec.num_shards, home_incarnation)
        found = self._find(key, home_incarnation)
        if found is not None and home_incarnation not in ("", found.incarnation):
            self._end(key, found.incarnation)
            found = None
        if found is not None:
            differences = found.spec.differences(spec)
            if differences:
                raise AlreadyExistsError(
                    f"accumulator {str(key)!r} exists with another spec: {'; '.join(differences)}", field="spec"
                )
            self._accumulators.check_lifetime(key, lifetime)
            self._accumulators.renew(key)
            return found, False
        check_place(self._member, key, spec.num_shards)
        place = self._places.of_new(spec)
        durability = durability_of_new(spec.durability, self._journals, "spec.durability")
        spec = _durable(spec.resolved(durability, place.name))
        own = self._begin(key, spec, place)
        try:
            incarnation = home_incarnation or (self._ordered.new() if spec.num_shards else self._new_incarnation())
            journal = None if self._journals is None else self._journals.begin(key, spec, lifetime, incarnation)
        except ServiceError:
            self._release(key)
            raise
        ledger = Ledger(self.new_call_memory(own.bookkeeping))
        accumulator = self._make(key, spec, place, incarnation, ledger, journal, own)
        self._accumulators.add(key, accumulator, lifetime)
        return accumulator, True

    def restore(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        lifetime: Lifetime,
        incarnation: str,
        ledger: Ledger,
        journal: FileJournal | None,
    ) -> Accumulator:
        """Restores an accumulator of an earlier run, with an empty sum and without averages.

        Raises:
            InvalidArgumentError: The name belongs to another server of the cluster.
            ResourceExhaustedError: The server has reached its limit of accumulators.
        """
        check_place(self._member, key, spec.num_shards)
        place = self._places.of_restored(spec, f"accumulator {str(key)!r}")
        if spec.num_shards and not self._parts.is_part(key, spec.num_shards):
            self._ordered.restored(incarnation)
        own = self._begin(key, spec, place)
        accumulator = self._make(key, spec, place, incarnation, ledger, journal, own)
        self._accumulators.add(key, accumulator, lifetime)
        return accumulator

    async def settle(self) -> None:
        """Returns once created and deleted accumulators are durable, so that others may see the change."""
        if self._journals is not None:
            await self._journals.settle()

    def has(self, key: ResourceKey, home_incarnation: str = "") -> bool:
        """Returns True if an accumulator of this name and incarnation at its home exists and may be opened.

        Raises:
            InvalidArgumentError: The name is empty.
            AbortedError: A later incarnation at the home is known here.
            AlreadyExistsError: The name belongs to somebody else.
        """
        found = self._find(key, home_incarnation)
        return found is not None and home_incarnation in ("", found.incarnation)

    def belongs_to_another(self, key: ResourceKey) -> bool:
        """Returns True if a name has the form NAME/INCARNATION/... of an existing accumulator.

        The workers of a training run use such names for requests of newcomers and for states. If another server of the
        cluster has the accumulator, only the form is checked.
        """
        segments = key.name.split("/")
        for at in range(1, len(segments) - 1):
            other, incarnation = replace(key, name="/".join(segments[:at])), segments[at]
            if self._member is not None and not self._member.is_home(other):
                if is_incarnation(incarnation):
                    return True
                continue
            found = self._accumulators.find(other) if other.name else None
            if found is not None and found.incarnation == incarnation:
                return True
        return False

    def check_is_home(self, key: ResourceKey) -> None:
        """Checks that this server is the home of an accumulator, and so decides about its rounds.

        Raises:
            InvalidArgumentError: It only holds a shard.
            NotFoundError: It does not exist.
        """
        if self._accumulators.get(key).spec.num_shards and self._member is not None:
            self._member.check_home(key)

    def get(self, key: ResourceKey, incarnation: str = "") -> Accumulator:
        """Returns the accumulator of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: It does not exist.
        """
        return self._accumulators.get(key, incarnation)

    def use(self, key: ResourceKey, incarnation: str = "") -> AbstractContextManager[Accumulator]:
        """Finds an accumulator as `get` does, and prevents its expiry while a call uses it."""
        return self._accumulators.use(key, incarnation)

    @contextmanager
    def waiting(self, user: Identity) -> Iterator[None]:
        """Counts a call that may wait for its user; the accumulator counts it for its container.

        Raises:
            ResourceExhaustedError: Too many calls of the caller wait.
        """
        with self.waiters.reserve(owner=user) as waiting:
            waiting.expect(1)
            yield

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns the lifetime of an existing accumulator."""
        return self._accumulators.lifetime(key)

    def delete(self, key: ResourceKey, incarnation: str = "", *, home_incarnation: str = "") -> bool:
        """Deletes an accumulator; returns whether it existed.

        Args:
            key: Its name.
            incarnation: The only incarnation to delete; empty for any.
            home_incarnation: If another server is its home, the latest incarnation to delete, from `gone`.

        Raises:
            InvalidArgumentError: The name is empty, or the incarnation at the home is malformed or given to the home.
        """
        if not home_incarnation:
            return self._end(key, incarnation)
        self._parts.delete_up_to(key, home_incarnation)
        with suppress(NotFoundError):
            found = self._accumulators.get(key, incarnation)
            return not is_later(found.incarnation, home_incarnation) and self._end(key, incarnation)
        return False

    def gone(self, key: ResourceKey) -> str:
        """Returns the incarnation up to which other servers may delete shards of accumulators of this name.

        None up to it exist at this server, their home, and new ones will be later. Empty if this server is not their
        home or the name is private to another user.
        """
        if self._member is None or not self._member.is_home(key):
            return ""
        try:
            found = self._accumulators.find(key)
        except AlreadyExistsError:
            return ""
        return latest_before(found.incarnation) if found is not None and found.spec.num_shards else self._ordered.new()

    def _end(self, key: ResourceKey, incarnation: str, reason: str | None = None) -> bool:
        accumulator = self._accumulators.remove(key, incarnation, reason)
        if accumulator is None:
            return False
        self._release(key)
        if self._journals is not None:
            self._journals.end(key)
        why = "" if reason is None else f": {reason}"
        accumulator.close(AbortedError(f"accumulator {str(key)!r} was deleted{why}"))
        return True

    def page(
        self, container: str, after: str, size: int, *, user: Identity = ANONYMOUS
    ) -> list[tuple[ResourceKey, Accumulator]]:
        """Returns up to `size` accumulators of a container with names greater than `after`, sorted by name."""
        return self._accumulators.page(container, after, size, user=user)

    def all(self) -> Iterator[tuple[ResourceKey, Accumulator]]:
        """Returns all accumulators."""
        return iter(self._accumulators)

    def all_owned(self) -> Iterator[tuple[ResourceKey, str, Accumulator]]:
        """Returns all accumulators with their owners; see `Directory.all_owned`."""
        return self._accumulators.all_owned()

    def _make(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        place: Place,
        incarnation: str,
        ledger: Ledger,
        journal: FileJournal | None,
        own: OwnReservations,
    ) -> Accumulator:
        make_sum, average_memory = self._sums(key, place, own)
        copies = place.average_copies(own.host_memory, self._allocate_averages(average_memory))
        kept = KeptBytes()
        undelivered = UndeliveredAverages(self._limits.undelivered_lease_seconds, self._clock, kept)
        history = AverageHistory(spec.keep_averages, kept)
        decision = Decision(incarnation, spec.deterministic) if spec.num_shards else None
        forget = (lambda _: None) if journal is None else journal.forget
        averages = KeptAverages(history, undelivered, kept, own.memory, copies, self._expiries.add, forget, decision)
        changes = RoundChanges(
            ledger=ledger,
            round_sum=make_sum(spec.without_components() if spec.num_shards else spec, averages.make_room),
            averages=averages,
            journal=None if journal is None else place.journal(journal, spec.durability, own.host_memory),
            member_bytes=MemberBytes(own.bookkeeping, ledger, holds_gradients=spec.deterministic),
            gate=self.gate,
            observer=self._observe(key),
            shard=self._shard(key, spec, make_sum, own, journal),
        )
        return Accumulator(str(key), spec, incarnation, changes, own.waiters)

    def _sums(self, key: ResourceKey, place: Place, own: OwnReservations) -> tuple[MakeSum, AverageMemory | None]:
        """Returns a factory of sums for one accumulator, and the memory of its averages."""
        average_memory = self._make_average_memory()

        def make_sum(spec: AccumulatorSpec, make_room: Callable[[], bool]) -> RoundSum:
            return RoundSum(
                spec,
                place,
                memory=own.memory,
                owner=key.user,
                make_room=make_room,
                average_memory=average_memory if place is self._places.host else None,
            )

        return make_sum, average_memory

    def _shard(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        make_sum: MakeSum,
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
            make_running_sum=None if is_held else partial(make_sum, shard.in_order_of_arrival(), lambda: False),
            memory=own.memory,
            bookkeeping=own.bookkeeping,
            journal=None if journal is None else journal.shard,
            clock=self._clock,
            call_seconds=self._client_lease_seconds,
        )

    def _allocate_averages(self, average_memory: AverageMemory | None) -> AllocateAverage:
        """Returns the allocator of averages on the host, in shared memory if others read them in place."""
        allocate = self._places.host.allocate

        def arrays(specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
            found = None
            if average_memory is not None:
                with suppress(MemoryError, ResourceExhaustedError):
                    found = average_memory.arrays(specs)
            return [allocate(*each) for each in specs] if found is None else found

        return arrays

    def bookkeeping_of(self, key: ResourceKey) -> Reservation:
        """Returns an empty reservation of bookkeeping for an accumulator of this name and creator."""
        return self.bookkeeping.reserve(owner=key.user, container=key.container)

    def new_call_memory(self, bookkeeping: Reservation) -> CallMemory[Answer]:
        """Returns an empty memory of calls for one accumulator, which counts for the holder of a reservation."""
        return CallMemory(
            window=self._limits.id_window,
            max_clients=self._limits.max_clients,
            silence=self._limits.client_memory_seconds,
            clock=self._clock,
            bookkeeping=bookkeeping,
        )

    def _find(self, key: ResourceKey, home_incarnation: str) -> Accumulator | None:
        """Returns the accumulator of this name; if it is a part, of this incarnation at its home or an earlier one."""
        found = self._accumulators.find(key)
        if home_incarnation:
            self._parts.check_is_not_earlier(key, None if found is None else found.incarnation, home_incarnation)
        return found

    def _begin(self, key: ResourceKey, spec: AccumulatorSpec, place: Place) -> OwnReservations:
        creator, container = key.user, key.container
        own = OwnReservations(
            memory=place.reserve(creator, container),
            host_memory=self._places.host.reserve(creator, container),
            bookkeeping=self.bookkeeping_of(key),
            count=self.count.reserve(1, owner=creator, container=container),
            waiters=self.waiters.reserve(container=container),  # the caller's share is counted by `waiting`
        )
        try:
            own.bookkeeping.grow(_names_bytes(key) + spec.bookkeeping_bytes)
        except BaseException:
            own.close()
            raise
        self._reservations[key] = own
        return own

    def _release(self, key: ResourceKey) -> None:
        self._reservations.pop(key).close()

    def expire(self, turn: Turn) -> int:
        """Releases averages kept for calls whose lease has ended, in one turn; returns the number of calls."""
        now, count = self._clock(), 0
        while self._expiries.is_due(now) and turn.look():
            count += self._expiries.pop().expire(turn)
        return count

    def close(self) -> None:
        """Fails all waiting calls because the server is shutting down."""
        for key, accumulator in self._accumulators:
            accumulator.close(UnavailableError(f"the server is shutting down; accumulator {str(key)!r} ends"))


def _names_bytes(key: ResourceKey) -> int:
    """Returns the memory of the names of an accumulator, which are stored several times."""
    return 4 * (getsizeof(key.container) + getsizeof(key.name))


def _durable(spec: AccumulatorSpec) -> AccumulatorSpec:
    """Returns a spec with GRADIENT in place of ROUND if the accumulator is sharded.

    Servers must not lose gradients that the home has counted, and writing the home's decisions costs next to nothing.
    """
    if spec.num_shards and spec.durability is Durability.ROUND:
        return spec.resolved(Durability.GRADIENT, spec.device)
    return spec
