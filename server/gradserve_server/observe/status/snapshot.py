"""Snapshots of the server: its accumulators with their last rounds, its layers and its workers at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest, nsmallest
from itertools import islice
from typing import NamedTuple

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ArrivalStatus,
    LayerStatus,
    RoundStatus,
    ServerStatus,
    WorkerStatus,
)
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.observe.rounds import History, RoundRecord, median_seconds
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.timing import InTurns, Turn

MOST_LAYERS = 1000
MOST_WORKERS = 500
"""The most workers that a round lists."""
_ARRIVALS_PER_ITEM = 8
"""The gradients that are described in the time of one item of a turn."""


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment, from which any one thread makes pictures.

    Attributes:
        server: Its status without accumulators, workers and layers, but with all errors.
        started: When it started, by the clock of the histories.
        accumulators: Its accumulators, in no particular order.
        layers: Its layers, in no particular order.
    """

    server: ServerStatus
    started: float
    accumulators: Sequence[AccumulatorSnapshot] = ()
    layers: Sequence[LayerSnapshot] = ()
    _described: dict[tuple[ResourceKey, int], AccumulatorStatus] = field(default_factory=dict, repr=False)
    """Descriptions by key and number of rounds; pictures share them."""

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns what a request asks for. Other tasks get turns while it is made."""
        found = [each async for each in InTurns(self.accumulators) if request.asks_for(each.key, each.owner)]
        shown, ranking = [], WorkerRanking()
        turn = Turn()
        for each in _ordered(found, request):
            described = self._description(each, request.max_rounds)
            shown.append(described)
            ranking.add(described)
            await turn.spend(2 + sum([len(each.arrivals) for each in described.rounds]) // _ARRIVALS_PER_ITEM)
        layers, num_layers = layer_statuses([each async for each in InTurns(self.layers)], request)
        return replace(
            self.server,
            num_accumulators=len(found),
            accumulators=tuple(shown),
            workers=ranking.ranked(request.max_workers),
            layers=tuple(layers),
            num_layers=num_layers,
            errors=self.server.errors if request.user.reaches_all else (),
        )

    def _description(self, accumulator: AccumulatorSnapshot, max_rounds: int) -> AccumulatorStatus:
        name = accumulator.key, max_rounds
        found = self._described.get(name)
        if found is None:
            found = self._described[name] = accumulator.described(self.started, max_rounds)
        return found


def _ordered(found: Sequence[AccumulatorSnapshot], request: StatusRequest) -> Sequence[AccumulatorSnapshot]:
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


def _name(accumulator: AccumulatorSnapshot) -> tuple[str, str]:
    return accumulator.key.container, accumulator.key.name


class AccumulatorSnapshot(NamedTuple):
    """An accumulator at one moment, which any thread can describe.

    Attributes:
        key: Its container and name.
        owner: The id of the client that owns it; empty if it is shared.
        status: Its status without its rounds.
        rounds: Its last rounds.
        workers: The senders of the current round's gradients, in order of arrival.
        times: When these gradients arrived, by the clock of the histories.
    """

    key: ResourceKey
    owner: str
    status: AccumulatorStatus
    rounds: tuple[RoundRecord, ...]
    workers: tuple[str, ...]
    times: tuple[float, ...]

    @property
    def last_round_ended(self) -> float:
        """The time at which the last round ended; 0 if none is kept."""
        return self.rounds[-1].ended if self.rounds else 0.0

    def described(self, started: float, max_rounds: int) -> AccumulatorStatus:
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
            step=self.status.global_step + 1,
            began=began - started,
            num_required=self.status.num_required,
            arrivals=tuple(
                [ArrivalStatus(worker, at - began) for worker, at in zip(self.workers, self.times, strict=True)]
            ),
            missing=self.status.missing,
        )


def snapshot_of(key: ResourceKey, owner: str, accumulator: Accumulator, history: History) -> AccumulatorSnapshot:
    """Returns a snapshot of an accumulator with its history."""
    rounds, queue = accumulator.rounds, accumulator.queue
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
        workers=_some(rounds.members.workers),
        missing=_some(rounds.missing_workers),
    )
    return AccumulatorSnapshot(key, owner, status, tuple(history.rounds), tuple(history.workers), tuple(history.times))


def _ended(record: RoundRecord, before: RoundRecord | None, started: float) -> RoundStatus:
    began = record.began
    arrivals = [ArrivalStatus(worker, at - began) for worker, at in zip(record.workers, record.times, strict=True)]
    arrivals += [ArrivalStatus(worker, at - began, stale=True) for worker, at in record.late]
    missing: tuple[str, ...] = ()
    if before is not None:
        present = set(record.workers)
        missing = _some(dict.fromkeys(worker for worker in before.workers if worker and worker not in present))
    return RoundStatus(
        step=record.step,
        began=began - started,
        ended=record.ended - started,
        num_required=record.num_required,
        arrivals=tuple(arrivals),
        missing=missing,
    )


def _some(workers: Iterable[str]) -> tuple[str, ...]:
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
    """Ranks workers by how long others wait for them in the rounds of accumulators."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}

    def add(self, accumulator: AccumulatorStatus) -> None:
        """Counts the rounds of an accumulator."""
        for each in accumulator.rounds:
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
