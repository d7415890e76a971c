"""Snapshots of the server for requests: accumulators and parameters with their last rounds, layers, workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ArrivalStatus,
    LayerStatus,
    ParametersStatus,
    PastRun,
    RequestStatus,
    RoundStatus,
    ServerStatus,
    WorkerStatus,
)
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.errors import InvalidArgumentError, PermissionDeniedError
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.limits import MAX_NAME_BYTES, check_length, quoted
from gradserve_server.observe.rounds import History, RoundRecord, median_seconds
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.resources.runs import MOST_PAST, Run, run_of
from gradserve_server.runtime.event_loop import InTurns, Turn
from gradserve_server.security.identity import ANONYMOUS, Identity


class Order(Enum):
    """The order of accumulators."""

    LATEST = "latest"
    """Most recent round first; accumulators without rounds by name."""
    NAME = "name"
    """By container and name."""
    RATE = "rate"
    """The most rounds per second first."""
    WAITING = "waiting"
    """The most waiting calls first."""
    BYTES = "bytes"
    """The most memory first."""


@dataclass(frozen=True)
class StatusRequest:
    """A request for the status of a server.

    Attributes:
        user: The caller, who sees the containers in which it has a role.
        container: The only container to show; empty for all of these.
        name_contains: Shows only names that contain this, in any case.
        order: The order of accumulators.
        max_accumulators: The most accumulators to describe.
        max_rounds: The most rounds of each.
        max_workers: The most workers.
        max_past_runs: The most deleted accumulators and parameters.
        call: The call to look up; None for none.
    """

    user: Identity = ANONYMOUS
    container: str = ""
    name_contains: str = ""
    order: Order = Order.LATEST
    max_accumulators: int = 100
    max_rounds: int = 20
    max_workers: int = 50
    max_past_runs: int = 0
    call: RequestId | None = None

    def asks_for(self, key: ResourceKey, owner: str) -> bool:
        """Returns True if it covers the thing with this key and owner ("" if shared), and the user may see that.

        It covers a training run's internal accumulator only if `name_contains` does not also match the run's name.
        """
        if self.container not in ("", key.container) or self.user.role_in(key.container) is None:
            return False
        if owner and not self.user.reaches_id(owner):
            return False
        wanted = self.name_contains.casefold()
        run = run_of(key.name)
        if run is not None and wanted in str(ResourceKey(key.container, run, key.user)).casefold():
            return False
        return wanted in str(key).casefold()

    def __post_init__(self) -> None:
        """Checks the request.

        Raises:
            InvalidArgumentError: A maximum is out of range, or a string is too long.
            PermissionDeniedError: The user has no role in the container.
        """
        for name in ("container", "name_contains"):
            check_length(getattr(self, name), MAX_NAME_BYTES, name)
        for name, least, most in (
            ("max_accumulators", 1, 1000),
            ("max_rounds", 1, 20),
            ("max_workers", 1, 1000),
            ("max_past_runs", 0, MOST_PAST),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidArgumentError(f"expected {least} to {most}, got {value}", field=name)
        if self.container and self.user.role_in(self.container) is None:
            raise PermissionDeniedError(
                f"the status of the container {quoted(self.container)} needs a role there; {self.user.name!r} has none",
                code="GS_ROLE",
            )


StatusT = TypeVar("StatusT", AccumulatorStatus, ParametersStatus)
MOST_LAYERS = 1000
_OF_PAST_RUNS = tuple([each.name for each in fields(PastRun)])
MOST_WORKERS = 500
"""The most workers that a round lists."""
_MOST_REQUESTS = 100
_ARRIVALS_PER_ITEM = 8
"""The gradients that are described in the time of one item of a turn."""


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment, from which any one thread makes pictures.

    Attributes:
        server: Its status without accumulators, parameters, workers and layers, but with all errors.
        started: When it started, by the clock of the histories.
        accumulators: Its accumulators, in no particular order.
        layers: Its layers, in no particular order.
        parameters: Its parameters, in no particular order.
        looked_up: What they know of the call that was looked up.
        past: The runs that have ended, the latest first.
    """

    server: ServerStatus
    started: float
    accumulators: Sequence[RoundsSnapshot[AccumulatorStatus]] = ()
    layers: Sequence[LayerSnapshot] = ()
    parameters: Sequence[RoundsSnapshot[ParametersStatus]] = ()
    looked_up: Sequence[RequestStatus] = ()
    past: Sequence[Run] = ()
    _described: dict[tuple[type, ResourceKey, int], Any] = field(default_factory=dict, repr=False)
    """Descriptions by kind, key and number of rounds; pictures share them."""

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns what a request asks for. Other tasks get turns while it is made."""
        ranking = WorkerRanking()
        accumulators, num_accumulators = await self._pictured(self.accumulators, request, ranking)
        parameters, num_parameters = await self._pictured(self.parameters, request, ranking)
        layers, num_layers = layer_statuses([each async for each in InTurns(self.layers)], request)
        return replace(
            self.server,
            num_accumulators=num_accumulators,
            accumulators=accumulators,
            parameters=parameters,
            num_parameters=num_parameters,
            workers=ranking.ranked(request.max_workers),
            layers=tuple(layers),
            num_layers=num_layers,
            requests=tuple(self.looked_up[:_MOST_REQUESTS]),
            errors=self.server.errors if request.user.reaches_all else (),
            past_runs=tuple(islice(map(_past_run, self._past_of(request)), request.max_past_runs)),
        )

    def _past_of(self, request: StatusRequest) -> Iterator[Run]:
        return (each for each in self.past if request.asks_for(each.key, each.owner))

    async def _pictured(
        self, snapshots: Sequence[RoundsSnapshot[StatusT]], request: StatusRequest, ranking: WorkerRanking
    ) -> tuple[tuple[StatusT, ...], int]:
        """Returns the first ones that a request asks for, and how many there are; adds their workers to a ranking."""
        found = [each async for each in InTurns(snapshots) if request.asks_for(each.key, each.owner)]
        shown = []
        turn = Turn()
        for each in _ordered(found, request):
            described = self._description(each, request.max_rounds)
            shown.append(described)
            ranking.add(described.rounds)
            await turn.spend(2 + sum([len(each.arrivals) for each in described.rounds]) // _ARRIVALS_PER_ITEM)
        return tuple(shown), len(found)

    def _description(self, snapshot: RoundsSnapshot[StatusT], max_rounds: int) -> StatusT:
        name = type(snapshot.status), snapshot.key, max_rounds
        found: StatusT | None = self._described.get(name)
        if found is None:
            found = self._described[name] = snapshot.described(self.started, max_rounds)
        return found


def _past_run(run: Run) -> PastRun:
    values = {name: getattr(run, name) for name in _OF_PAST_RUNS}
    return PastRun(**values)


def _ordered(found: Sequence[RoundsSnapshot[StatusT]], request: StatusRequest) -> Sequence[RoundsSnapshot[StatusT]]:
    count = request.max_accumulators
    match request.order:
        case Order.NAME:
            return nsmallest(count, found, key=_name)
        case Order.RATE:
            return nlargest(count, found, key=lambda each: each.status.rounds_per_second)
        case Order.WAITING:
            return nlargest(count, found, key=lambda each: each.status.num_waiting)
        case Order.BYTES:
            return nlargest(count, found, key=lambda each: each.status.num_bytes)
        case Order.LATEST:
            return nsmallest(count, found, key=lambda each: (-each.last_round_ended, _name(each)))


def _name(snapshot: RoundsSnapshot[Any]) -> tuple[str, str]:
    return snapshot.key.container, snapshot.key.name


@dataclass(frozen=True, slots=True)
class RoundsSnapshot(Generic[StatusT]):
    """An accumulator or parameters at one moment, which any thread can describe.

    Attributes:
        key: The container and name.
        owner: The id of the client that owns it; empty if it is shared.
        status: Its status without its rounds.
        step: Its step.
        rounds: Its last rounds.
        workers: The senders of the current round's gradients, in order of arrival.
        times: When these gradients arrived, by the clock of the histories.
        staleness: How stale these updates of parameters are; empty for an accumulator.
    """

    key: ResourceKey
    owner: str
    status: StatusT
    step: int
    rounds: tuple[RoundRecord, ...]
    workers: tuple[str, ...]
    times: tuple[float, ...]
    staleness: tuple[int, ...] = ()

    @property
    def last_round_ended(self) -> float:
        """The time at which the last round ended; 0 if none is kept."""
        return self.rounds[-1].ended if self.rounds else 0.0

    def described(self, started: float, max_rounds: int) -> StatusT:
        """Returns its status with its rounds.

        Args:
            started: When the server started, by the clock of the histories.
            max_rounds: The most rounds to describe; the latest ones.
        """
        count = max_rounds - bool(self.times)
        previous = [None, *self.rounds]
        pairs = list(zip(self.rounds, previous, strict=False))[-count:] if count else []
        described = [_ended(each, before, started) for each, before in pairs]
        if self.times:
            described.append(self._open(started))
        return replace(self.status, median_round_seconds=median_seconds(self.rounds), rounds=tuple(described))

    def _open(self, started: float) -> RoundStatus:
        began = self.times[0]
        return RoundStatus(
            step=self.step + 1,
            began=began - started,
            num_required=self.status.num_required,
            arrivals=tuple(_arrivals(self.workers, self.times, self.staleness)),
            missing=self.status.missing,
        )


def snapshot_of(
    key: ResourceKey, owner: str, accumulator: Accumulator, history: History
) -> RoundsSnapshot[AccumulatorStatus]:
    """Returns a snapshot of an accumulator with its history."""
    rounds, queue = accumulator.rounds, accumulator.queue
    comparison = rounds.comparison
    status = AccumulatorStatus(
        container=key.container,
        name=key.name,
        global_step=rounds.global_step,
        num_rounds=rounds.current.number,
        rounds_per_second=history.rounds_per_second,
        num_accumulated=accumulator.num_accumulated,
        num_required=queue.num_required,
        num_waiting=len(queue),
        num_bytes=accumulator.num_bytes,
        accepted=history.accepted,
        stale=history.stale,
        duplicate=history.duplicate,
        refused=history.refused,
        workers=some_of(rounds.members.workers),
        missing=some_of(rounds.missing_workers),
        different={
            each.worker_id: -1 if each.equal_at is None else each.equal_at
            for each in comparison.different[:MOST_WORKERS]
        },
        num_compared=comparison.num_workers,
        compared_step=comparison.step or 0,
        different_since=dict(islice(comparison.different_since.items(), MOST_WORKERS)),
    )
    current = tuple(history.workers), tuple(history.times)
    return RoundsSnapshot(key, owner, status, rounds.global_step, tuple(history.rounds), *current)


def _arrivals(workers: Sequence[str], times: Sequence[float], staleness: Sequence[int]) -> list[ArrivalStatus]:
    """Returns the gradients of a round that were not late."""
    began = times[0] if times else 0.0
    if not staleness:
        return [ArrivalStatus(worker, at - began) for worker, at in zip(workers, times, strict=True)]
    return [
        ArrivalStatus(worker, at - began, staleness=stale)
        for worker, at, stale in zip(workers, times, staleness, strict=True)
    ]


def _ended(record: RoundRecord, before: RoundRecord | None, started: float) -> RoundStatus:
    began = record.began
    arrivals = _arrivals(record.workers, record.times, record.staleness)
    arrivals += [ArrivalStatus(worker, at - began, stale=True) for worker, at in record.late]
    missing: tuple[str, ...] = ()
    if before is not None:
        present = set(record.workers)
        missing = some_of(dict.fromkeys(worker for worker in before.workers if worker and worker not in present))
    return RoundStatus(
        step=record.step,
        began=began - started,
        ended=record.ended - started,
        num_required=record.num_required,
        arrivals=tuple(arrivals),
        missing=missing,
        reason=record.reason,
        apply_seconds=record.apply_seconds,
        metrics=record.metrics,
    )


def some_of(workers: Iterable[str]) -> tuple[str, ...]:
    """Returns the first of many workers."""
    return tuple(islice(workers, MOST_WORKERS))


class LayerSnapshot(NamedTuple):
    """A layer at one moment.

    Attributes:
        key: Its container and name.
        owner: The id of the client that owns it; empty if it is shared.
        num_forwards: The number of forwards that it keeps.
        num_bytes: Its memory.
    """

    key: ResourceKey
    owner: str
    num_forwards: int
    num_bytes: int


def layer_snapshots(layers: LayerRegistry) -> Iterator[LayerSnapshot]:
    """Returns snapshots of all layers, in no particular order."""
    for key, owner, layer in layers.all_owned():
        yield LayerSnapshot(key, owner, len(layer.forwards), layer.num_bytes)


def layer_statuses(layers: Iterable[LayerSnapshot], request: StatusRequest) -> tuple[Sequence[LayerStatus], int]:
    """Returns the layers that a request covers (the first `MOST_LAYERS` by container and name), and their number."""
    found = [each for each in layers if request.asks_for(each.key, each.owner)]
    first = nsmallest(MOST_LAYERS, found, key=lambda each: each.key)
    described = [LayerStatus(each.key.container, each.key.name, each.num_forwards, each.num_bytes) for each in first]
    return described, len(found)


class WorkerRanking:
    """Ranks workers by how long others wait for them in rounds."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}

    def add(self, rounds: Iterable[RoundStatus]) -> None:
        """Counts some rounds."""
        for each in rounds:
            self._add_round(each)

    def ranked(self, count: int) -> tuple[WorkerStatus, ...]:
        """Returns the workers for which others waited longest first; ties go to those that were late most often."""
        found = (
            WorkerStatus(
                worker_id=worker_id,
                rounds=seen.rounds,
                mean_lateness=seen.lateness / seen.rounds if seen.rounds else 0.0,
                times_last=seen.times_last,
                waited_for=seen.waited_for,
                stale=seen.stale,
                missed=seen.missed,
                last_seen=seen.last_seen,
            )
            for worker_id, seen in self._workers.items()
        )
        return tuple(nlargest(count, found, key=lambda each: (each.waited_for, each.stale, each.missed)))

    def _add_round(self, described: RoundStatus) -> None:
        in_time = [each for each in described.arrivals if not each.stale]
        for arrival in described.arrivals:
            if not arrival.worker_id:
                continue
            seen = self._of(arrival.worker_id)
            seen.last_seen = max(seen.last_seen, described.began + arrival.after)
            if arrival.stale:
                seen.stale += 1
            else:
                seen.rounds += 1
                seen.lateness += arrival.after
        if described.ended and len(in_time) > 1 and in_time[-1].worker_id:
            seen = self._of(in_time[-1].worker_id)
            seen.times_last += 1
            seen.waited_for += in_time[-1].after - in_time[-2].after
        if described.ended:
            for worker_id in described.missing:
                self._of(worker_id).missed += 1

    def _of(self, worker_id: str) -> _Seen:
        return self._workers.setdefault(worker_id, _Seen())


@dataclass(slots=True)
class _Seen:
    rounds: int = 0
    lateness: float = 0.0
    times_last: int = 0
    waited_for: float = 0.0
    stale: int = 0
    missed: int = 0
    last_seen: float = 0.0
