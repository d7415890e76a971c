"""The accumulators of a server, by container and name; and what parameters, which have rounds too, share with them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.factory import AccumulatorFactory, OwnReservations, RoundKind
from gradserve_server.accumulators.journal import AccumulatorJournals, FileJournal, RoundJournals
from gradserve_server.accumulators.ledger import Ledger
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.sharding.home import (
    OrderedIncarnations,
    PartIncarnations,
    is_incarnation,
    is_later,
    latest_before,
)
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.waits import TakeQueue
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.resources.cluster import Member, check_place
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import Directory, Resource, ResourceKey
from gradserve_server.resources.runs import DELETED, STOPPED, Runs
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.storage.journal import Durability, durability_of_new


class _WithRounds(Resource, Protocol):
    @property
    def spec(self) -> Any: ...
    @property
    def rounds(self) -> Rounds: ...
    def close(self, error: ServiceError, /) -> None: ...


RoundT = TypeVar("RoundT", bound=_WithRounds)
JournalsT = TypeVar("JournalsT", bound=RoundJournals[Any, Any])


class RoundRegistry(Generic[RoundT, JournalsT]):
    """Everything of one kind that has rounds on a server: finds and deletes it, and ends it with the server.

    Not thread-safe: used on the event loop only.
    """

    _verbs = ("ends", "was")
    """The verbs of the kind in messages."""

    def __init__(
        self,
        directory: Directory[RoundT],
        kind: str,
        ordered: OrderedIncarnations,
        *,
        journals: JournalsT | None,
        member: Member | None,
        runs: Runs,
    ) -> None:
        """Takes, among others, the place of the server in a cluster, and what keeps runs that have ended.

        Args:
            directory: What exists.
            kind: What messages call it: "accumulator" or "parameters".
            ordered: Makes the incarnations of what is sharded.
            journals: What writes creations and deletions down; None without a state directory.
            member: The place of the server in a cluster, whose other servers have resources of other names.
            runs: Keeps what has been deleted.
        """
        self.ordered = ordered
        self._directory = directory
        self._kind = kind
        self._member = member
        self._runs = runs
        self._parts = PartIncarnations(member, kind)
        self._journals = journals
        self._reservations: dict[ResourceKey, OwnReservations] = {}

    def get(self, key: ResourceKey, incarnation: str = "") -> RoundT:
        """Returns the resource of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: It does not exist.
        """
        return self._directory.get(key, incarnation)

    def use(self, key: ResourceKey, incarnation: str = "") -> AbstractContextManager[RoundT]:
        """Finds a resource as `get` does, and prevents its expiry while a call uses it."""
        return self._directory.use(key, incarnation)

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns the lifetime of an existing resource."""
        return self._directory.lifetime(key)

    def page(
        self, container: str, after: str, size: int, *, user: Identity = ANONYMOUS
    ) -> list[tuple[ResourceKey, RoundT]]:
        """Returns up to `size` resources of a container with names greater than `after`, sorted by name."""
        return self._directory.page(container, after, size, user=user)

    def all(self) -> Iterator[tuple[ResourceKey, RoundT]]:
        """Returns all of them."""
        return iter(self._directory)

    def all_owned(self) -> Iterator[tuple[ResourceKey, str, RoundT]]:
        """Returns all of them with their owners; see `Directory.all_owned`."""
        return self._directory.all_owned()

    async def settle(self) -> None:
        """Returns once creations and deletions are durable, so that others may see the change."""
        if self._journals is not None:
            await self._journals.settle()

    def delete(self, key: ResourceKey, incarnation: str = "", *, home_incarnation: str = "") -> bool:
        """Deletes a resource; returns whether it existed.

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
            found = self._directory.get(key, incarnation)
            return not is_later(found.incarnation, home_incarnation) and self._end(key, incarnation)
        return False

    def gone(self, key: ResourceKey) -> str:
        """Returns the incarnation up to which other servers may delete shards of this name.

        None up to it exist at this server, their home, and new ones will be later. Empty if this server is not their
        home or the name is private to another user.
        """
        if self._member is None or not self._member.is_home(key):
            return ""
        try:
            found = self._directory.find(key)
        except AlreadyExistsError:
            return ""
        return latest_before(found.incarnation) if found is not None and found.spec.num_shards else self.ordered.new()

    def close(self) -> None:
        """Fails all waiting calls because the server is shutting down."""
        for key, each in self._directory:
            if each.spec.durability is Durability.NONE:
                self._runs.end(self._kind, key, each.rounds.global_step, STOPPED, self._metrics(each))
            message = f"the server is shutting down; {self._kind} {str(key)!r} {self._verbs[0]}"
            each.close(UnavailableError(message, code="GS_SHUTTING_DOWN"))

    def _metrics(self, _resource: RoundT) -> Mapping[str, float]:
        """Returns what a run keeps of the metrics that workers have reported."""
        return {}

    def _end(self, key: ResourceKey, incarnation: str, reason: str | None = None) -> bool:
        found = self._directory.remove(key, incarnation, reason)
        if found is None:
            return False
        self._reservations.pop(key).close()
        if self._journals is not None:
            self._journals.end(key)
        self._runs.end(self._kind, key, found.rounds.global_step, reason or DELETED, self._metrics(found))
        why = "" if reason is None else f": {reason}"
        message = f"{self._kind} {str(key)!r} {self._verbs[1]} deleted{why}"
        found.close(AbortedError(message, code="GS_DELETED"))
        return True


class AccumulatorRegistry(RoundRegistry[Accumulator, AccumulatorJournals]):
    """The accumulators of a server: creates, finds and deletes them.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        factory: AccumulatorFactory,
        lifetimes: Lifetimes,
        *,
        new_incarnation: Callable[[], str],
        journals: AccumulatorJournals | None = None,
        wall_clock: Callable[[], int] = time.time_ns,
        is_of_another_run: Callable[[str], bool] = lambda _: False,
        member: Member | None = None,
        runs: Runs | None = None,
    ) -> None:
        """Takes, among others, what makes accumulators, and the journals if there is a state directory.

        `wall_clock` has the nanoseconds since 1970. `member` is the place of the server in a cluster, whose other
        servers have accumulators of other names. `runs` keeps what has been deleted.
        """
        super().__init__(
            Directory("accumulator", lifetimes, self._end, is_of_another_run=is_of_another_run),
            "accumulator",
            OrderedIncarnations(lambda: self._new_incarnation(), wall_clock, journals),
            journals=journals,
            member=member,
            runs=Runs(wall_clock) if runs is None else runs,
        )
        self.factory = factory
        self._new_incarnation = new_incarnation

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
        places = self.factory.places
        spec = places.named(_durable(spec))
        self._parts.check_creation(key, spec.num_shards, home_incarnation)
        found = self._find(key, home_incarnation)
        if found is not None and home_incarnation not in ("", found.incarnation):
            self._end(key, found.incarnation)
            found = None
        if found is not None:
            differences = found.spec.differences(spec)
            if differences:
                raise AlreadyExistsError(
                    f"accumulator {str(key)!r} exists with another spec: {'; '.join(differences)}",
                    field="spec",
                    code="GS_OTHER_SPEC",
                )
            self._directory.check_lifetime(key, lifetime)
            self._directory.renew(key)
            return found, False
        check_place(self._member, key, spec.num_shards)
        place = places.of_new(spec)
        durability = durability_of_new(spec.durability, self._journals, "spec.durability")
        spec = _durable(spec.resolved(durability, place.name))
        own = self.factory.reserve(key, spec, place)
        try:
            incarnation = home_incarnation or (self.ordered.new() if spec.num_shards else self._new_incarnation())
            journal = None if self._journals is None else self._journals.begin(key, spec, lifetime, incarnation)
        except ServiceError:
            own.close()
            raise
        ledger = Ledger(self.factory.new_call_memory(own.bookkeeping))
        return self._add(key, spec, lifetime, place, incarnation, ledger, journal, own), True

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
        place = self.factory.places.of_restored(spec, f"accumulator {str(key)!r}")
        if spec.num_shards and not self._parts.is_part(key, spec.num_shards):
            self.ordered.restored(incarnation)
        own = self.factory.reserve(key, spec, place)
        return self._add(key, spec, lifetime, place, incarnation, ledger, journal, own)

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
            found = self._directory.find(other) if other.name else None
            if found is not None and found.incarnation == incarnation:
                return True
        return False

    def check_is_home(self, key: ResourceKey) -> None:
        """Checks that this server is the home of an accumulator, and so decides about its rounds.

        Raises:
            InvalidArgumentError: It only holds a shard.
            NotFoundError: It does not exist.
        """
        if self._directory.get(key).spec.num_shards and self._member is not None:
            self._member.check_home(key)

    def _add(
        self,
        key: ResourceKey,
        spec: AccumulatorSpec,
        lifetime: Lifetime,
        place: Place,
        incarnation: str,
        ledger: Ledger,
        journal: FileJournal | None,
        own: OwnReservations,
    ) -> Accumulator:
        kind = RoundKind(ledger, TakeQueue())
        changes = self.factory.make_changes(key, spec, place, incarnation, kind, journal, own)
        accumulator = Accumulator(str(key), spec, incarnation, changes, own.waiters)
        self._reservations[key] = own
        self._directory.add(key, accumulator, lifetime)
        if not self._parts.is_part(key, spec.num_shards):
            self._runs.begin("accumulator", key, lifetime.owner, incarnation)
        return accumulator

    def _find(self, key: ResourceKey, home_incarnation: str) -> Accumulator | None:
        """Returns the accumulator of this name; if it is a part, of this incarnation at its home or an earlier one."""
        found = self._directory.find(key)
        if home_incarnation:
            self._parts.check_is_not_earlier(key, None if found is None else found.incarnation, home_incarnation)
        return found


def _durable(spec: AccumulatorSpec) -> AccumulatorSpec:
    """Returns a spec with GRADIENT in place of ROUND if the accumulator is sharded.

    Servers must not lose gradients that the home has counted, and writing the home's decisions costs next to nothing.
    """
    if spec.num_shards and spec.durability is Durability.ROUND:
        return spec.resolved(Durability.GRADIENT, spec.device)
    return spec
