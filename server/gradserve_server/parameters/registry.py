"""The parameters of a server, by container and name."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

from gradserve_server.accumulators.factory import AccumulatorFactory, OwnReservations, RoundKind
from gradserve_server.accumulators.gradient import Array, Average
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.registry import RoundRegistry
from gradserve_server.accumulators.rounds import AccumulatorObserver, Unobserved
from gradserve_server.accumulators.sharding.home import (
    Decision,
    OrderedIncarnations,
    check_ordered,
)
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    NotFoundError,
    OutOfRangeError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.parameters.changes import Machine
from gradserve_server.parameters.journal import ParametersJournal, ParametersJournals
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.parameters import WORDING, Parameters
from gradserve_server.parameters.queue import Creators, UpdateQueue
from gradserve_server.parameters.record import RoundRecord, RoundRecords
from gradserve_server.parameters.sharding import FollowingQueue
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.update_sum import update_sum
from gradserve_server.parameters.variables import Loaded, OptimizerState, Variables
from gradserve_server.parameters.versions import Version, Versions
from gradserve_server.resources.cluster import Member, check_place
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import Directory, ResourceKey
from gradserve_server.resources.runs import Runs
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.storage.journal import Durability, durability_of_new

_FIELD = "home_incarnation"
_MOST_HANDED_OUT = 1024


class ParametersRegistry(RoundRegistry[Parameters, ParametersJournals]):
    """The parameters of a server: creates, finds, forks and deletes them.

    Not thread-safe: used on the event loop only.
    """

    _verbs = ("end", "were")

    def __init__(
        self,
        factory: AccumulatorFactory,
        lifetimes: Lifetimes,
        stepper: Stepper,
        *,
        new_incarnation: Callable[[], str],
        journals: ParametersJournals | None = None,
        wall_clock: Callable[[], int] = time.time_ns,
        is_of_another_run: Callable[[str], bool] = lambda _: False,
        member: Member | None = None,
        runs: Runs | None = None,
        ordered: OrderedIncarnations | None = None,
        observe: Callable[[ResourceKey, UpdateLedger], AccumulatorObserver] = lambda _, __: Unobserved(),
    ) -> None:
        """Takes, among others, what makes machines of rounds, and the journals if there is a state directory.

        `wall_clock` has the nanoseconds since 1970. `member` is the place of the server in a cluster, whose other
        servers have parameters of other names. `ordered` makes the incarnations of sharded parameters. `observe`
        returns the observer of new parameters with a ledger. `runs` keeps what has been deleted.
        """
        super().__init__(
            Directory("parameters", lifetimes, self._end, article="some", is_of_another_run=is_of_another_run),
            "parameters",
            ordered or OrderedIncarnations(lambda: self._new_incarnation(), wall_clock, None),
            journals=journals,
            member=member,
            runs=Runs(wall_clock) if runs is None else runs,
        )
        self.factory = factory
        self._lifetimes = lifetimes
        self._stepper = stepper
        self._new_incarnation = new_incarnation
        self._wall_clock = wall_clock
        self._handed_out: OrderedDict[ResourceKey, str] = OrderedDict()
        """The incarnations of sharded parameters that their creators are about to create."""
        self._observe = observe
        self._beginning: dict[ResourceKey, asyncio.Future[None]] = {}
        self.creators = Creators()
        """The turns of clients that create parameters of the same name."""

    async def create(
        self,
        key: ResourceKey,
        spec: ParametersSpec,
        lifetime: Lifetime = SHARED,
        initial: Loaded | None = None,
        home_incarnation: str = "",
    ) -> tuple[Parameters, bool]:
        """Returns the parameters of this name, and whether they are new.

        Args:
            key: Their name.
            spec: Their properties; of sharded parameters, those of `ParametersSpec.placed`.
            lifetime: Their lifetime.
            initial: Values to create them with; None only finds existing ones.
            home_incarnation: Of sharded parameters, what `hand_out` of their home has returned. On another server, the
                shard takes the place of an earlier one.

        Raises:
            InvalidArgumentError: The name is empty, or belongs to another server of the cluster; or the values do not
                fit.
            NotFoundError: There are none, and no values.
            AbortedError: A later incarnation is known here.
            AlreadyExistsError: Parameters of this name have other properties or another lifetime.
            ResourceExhaustedError: There are too many, or there is not enough memory or disk.
        """
        check_place(self._member, key, spec.num_shards, "parameters")
        spec = _durable(spec)
        while (beginning := self._beginning.get(key)) is not None:
            await asyncio.shield(beginning)  # a creation that fails leaves the name free
        found = self._directory.find(key)
        if spec.follows and (home_incarnation or initial is not None):
            check_ordered(home_incarnation, _FIELD)
            self._parts.check_is_not_earlier(key, None if found is None else found.incarnation, home_incarnation)
            if found is not None and found.incarnation != home_incarnation:
                self._end(key, found.incarnation)
                found = None
        if found is not None:
            differences = found.spec.differences(spec)
            if differences:
                raise AlreadyExistsError(
                    f"parameters {str(key)!r} exist with other properties: {'; '.join(differences)}",
                    field="spec",
                    code="GS_OTHER_SPEC",
                )
            self._directory.check_lifetime(key, lifetime)
            self._directory.renew(key)
            return found, False
        if initial is None:
            raise NotFoundError(
                f"there are no parameters {str(key)!r}: create them with values",
                field="parameters.name",
                code="GS_NO_PARAMETERS",
            )
        if spec.num_shards and not spec.follows and home_incarnation != self._handed_out.pop(key, None):
            raise AbortedError(
                f"another client has begun to create parameters {str(key)!r} since: begin again", field=_FIELD
            )
        made = await self._create(key, spec, lifetime, initial, home_incarnation)
        self.creators.end(key)
        return made, True

    def hand_out(self, key: ResourceKey) -> str:
        """Returns the incarnation with which a creator, who has the turn, creates sharded parameters on all servers.

        The one that another creator got before can be used no more.
        """
        self._handed_out.pop(key, None)
        while len(self._handed_out) >= _MOST_HANDED_OUT:
            self._handed_out.popitem(last=False)
        incarnation = self._handed_out[key] = self.ordered.new()
        return incarnation

    async def _create(
        self, key: ResourceKey, spec: ParametersSpec, lifetime: Lifetime, initial: Loaded, incarnation: str
    ) -> Parameters:
        spec = _durable(spec.resolved(durability_of_new(spec.durability, self._journals, "spec.durability")))
        place = self.factory.places.host
        own = self.factory.reserve(key, spec.updates, place)
        try:
            incarnation = incarnation or self._new_incarnation()
            journal = None if self._journals is None else self._journals.begin(key, spec, lifetime, incarnation)
        except ServiceError:
            own.close()
            raise
        ledger = self._new_ledger(spec, own)
        made = self._add(key, spec, lifetime, incarnation, ledger, journal, own)
        beginning = self._beginning[key] = asyncio.get_running_loop().create_future()
        try:
            await made.begin(initial)
        except BaseException:
            self._end(key, incarnation, "it could not begin")
            raise
        finally:
            del self._beginning[key]
            beginning.set_result(None)
        return made

    async def fork(
        self, key: ResourceKey, incarnation: str, step: int | None, fork: ResourceKey, lifetime: Lifetime
    ) -> Parameters:
        """Returns parameters that begin with a version of others, whose memory they share until their first round.

        Args:
            key: The others.
            incarnation: Their incarnation; empty for any.
            step: The step of the version; None for the newest, with the state of its optimizer.
            fork: The name of the new ones.
            lifetime: Their lifetime.

        Raises:
            OutOfRangeError: The version is no longer kept, or does not exist yet.
            AlreadyExistsError: The name is taken.
        """
        with self.use(key, incarnation) as source:
            if step is not None and step > source.rounds.global_step:
                raise OutOfRangeError(
                    f"expected a step of at most {source.rounds.global_step}, the present one of parameters "
                    f"{str(key)!r}, got {step}",
                    field="step",
                )
            if step in (None, source.rounds.global_step):
                async with source.reading_state() as (version, state):
                    if step in (None, version.step):  # no round has ended meanwhile
                        return await self._forked(source.spec, fork, lifetime, version, state)
            version = await source.read(step, 0.0)
            return await self._forked(source.spec, fork, lifetime, version, None)

    async def _forked(
        self,
        spec: ParametersSpec,
        fork: ResourceKey,
        lifetime: Lifetime,
        version: Version,
        state: OptimizerState | None,
    ) -> Parameters:
        loaded = Loaded(cast(Mapping[str, Array], version.values), version.step, state, is_immutable=True)
        made, created = await self.create(fork, spec, lifetime, loaded)
        if not created and made.state.step < loaded.step:
            raise AlreadyExistsError(f"parameters {str(fork)!r} exist already, at step {made.state.step}", field="fork")
        return made

    async def restore(
        self,
        key: ResourceKey,
        spec: ParametersSpec,
        lifetime: Lifetime,
        incarnation: str,
        ledger_of: Callable[[UpdateLedger], ParametersJournal | None],
        versions: Sequence[tuple[Average, Sequence[RequestId]]],
        state: OptimizerState,
        records: Sequence[RoundRecord],
    ) -> Parameters:
        """Restores parameters of an earlier run, without the updates of their current round.

        Args:
            key: Their name.
            spec: Their properties, with their first rules.
            lifetime: Their lifetime.
            incarnation: Their incarnation.
            ledger_of: Fills the ledger, and returns the journal; None if it writes nothing.
            versions: See `Parameters.begin_again`, like the following.
            state: The state of the optimizer.
            records: The records of rounds.

        Raises:
            InvalidArgumentError: The name belongs to another server of the cluster, or they do not fit together.
            ResourceExhaustedError: The server has reached its limits.
        """
        check_place(self._member, key, spec.num_shards, "parameters")
        if spec.num_shards and not spec.follows:
            self.ordered.restored(incarnation)
        own = self.factory.reserve(key, spec.updates, self.factory.places.host)
        ledger = self._new_ledger(spec, own)
        journal = ledger_of(ledger)
        made = self._add(key, spec, lifetime, incarnation, ledger, journal, own)
        await made.begin_again(versions, state, records)
        return made

    def has(self, key: ResourceKey) -> bool:
        """Returns True if parameters of this name exist and may be opened.

        Raises:
            InvalidArgumentError: The name is empty.
            AlreadyExistsError: The name belongs to somebody else.
        """
        return self._directory.find(key) is not None and key not in self._beginning

    def get(self, key: ResourceKey, incarnation: str = "") -> Parameters:
        found = super().get(key, incarnation)
        self._check_begun(key)
        return found

    def use(self, key: ResourceKey, incarnation: str = "") -> AbstractContextManager[Parameters]:
        using = super().use(key, incarnation)
        self._check_begun(key)
        return using

    def _check_begun(self, key: ResourceKey) -> None:
        if key in self._beginning:
            raise NotFoundError(
                f"parameters {str(key)!r} are being created", field="parameters.name", code="GS_NO_PARAMETERS"
            )

    def gone(self, key: ResourceKey) -> str:
        gone = super().gone(key)
        if gone:
            self._handed_out.pop(key, None)
        return gone

    def page(
        self, container: str, after: str, size: int, *, user: Identity = ANONYMOUS
    ) -> list[tuple[ResourceKey, Parameters]]:
        """Returns those that are not being created; see `RoundRegistry.page`."""
        found: list[tuple[ResourceKey, Parameters]] = []
        while len(found) < size:
            page = super().page(container, after, size - len(found), user=user)
            if not page:
                break
            after = page[-1][0].name
            found += [each for each in page if each[0] not in self._beginning]
        return found

    def __len__(self) -> int:
        return len(self._directory)

    def all(self) -> Iterator[tuple[ResourceKey, Parameters]]:
        """Returns all parameters but those that are being created."""
        return (each for each in super().all() if each[0] not in self._beginning)

    def all_owned(self) -> Iterator[tuple[ResourceKey, str, Parameters]]:
        """Returns the same with their owners."""
        return (each for each in super().all_owned() if each[0] not in self._beginning)

    def close(self) -> None:
        self.creators.close(UnavailableError("the server is shutting down", code="GS_SHUTTING_DOWN"))
        super().close()

    def _metrics(self, resource: Parameters) -> Mapping[str, float]:
        return resource.metrics

    def _new_ledger(self, spec: ParametersSpec, own: OwnReservations) -> UpdateLedger:
        return UpdateLedger(
            self.factory.new_call_memory(own.bookkeeping),
            spec,
            self.factory.clock,
            self._wall_clock,
            self._lifetimes.client_lease_seconds,
            self._lifetimes.clients.has_worker,
        )

    def _add(
        self,
        key: ResourceKey,
        spec: ParametersSpec,
        lifetime: Lifetime,
        incarnation: str,
        ledger: UpdateLedger,
        journal: ParametersJournal | None,
        own: OwnReservations,
    ) -> Parameters:
        place, here = self.factory.places.host, spec.here
        variables = Variables(here, place, self._stepper)
        if journal is not None:
            journal.variables = variables
        records = RoundRecords(here.keep_rounds, own.bookkeeping)
        queue = (FollowingQueue if spec.follows else UpdateQueue)(str(key), ledger)
        forget_rounds = (lambda _: None) if journal is None else journal.forget_rounds
        kind = RoundKind(
            ledger,
            queue,
            lambda _spec, place: update_sum(variables, lambda: ledger.round_rules, place),
            partial(Versions, ledger=ledger, variables=variables, records=records, forget_rounds=forget_rounds),
            WORDING,
            lambda key: self._observe(key, ledger),
            spec.holds_updates,
            Decision(incarnation, spec.deterministic) if spec.num_shards and not spec.follows else None,
            self._shard(key, spec, own, journal) if spec.num_shards else None,
        )
        changes = self.factory.make_changes(key, here.updates, place, incarnation, kind, journal, own)
        machine = Machine(changes, ledger, queue, variables, records, journal, own.memory, own.waiters, here)
        parameters = Parameters(str(key), spec, incarnation, machine)
        self._reservations[key] = own
        self._directory.add(key, parameters, lifetime)
        if not spec.follows:
            self._runs.begin("parameters", key, lifetime.owner, incarnation)
        return parameters

    def _shard(
        self, key: ResourceKey, spec: ParametersSpec, own: OwnReservations, journal: ParametersJournal | None
    ) -> Shard:
        """Returns what holds updates until they count. At the home they need not survive a restart."""
        staged = spec.here.updates.in_order(of_workers=True)
        return Shard(
            str(key),
            staged,
            make_sum=lambda: RoundSum(staged, self.factory.places.host, memory=own.memory, owner=key.user),
            make_running_sum=None,
            memory=own.memory,
            bookkeeping=own.bookkeeping,
            journal=journal.shard if journal is not None and spec.follows else None,
            clock=self.factory.clock,
            call_seconds=self._lifetimes.client_lease_seconds,
        )


def _durable(spec: ParametersSpec) -> ParametersSpec:
    """Returns a spec with GRADIENT in place of ROUND if the parameters are sharded.

    An update that the home has lost would be staged nowhere when its client sends it again.
    """
    if spec.num_shards and spec.durability is Durability.ROUND:
        return spec.resolved(Durability.GRADIENT)
    return spec
