"""Takes snapshots of the server, and makes pictures of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest, nsmallest
from typing import TypeVar

from gradserve.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    GradientTotals,
    MemoryStatus,
    MethodStatus,
    ServerStatus,
    TrafficStatus,
)
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.observe.observed import Observed
from gradserve_server.observe.status.accumulators import AccumulatorSnapshot, snapshot_of
from gradserve_server.observe.status.figures import Figures, accumulator_figures
from gradserve_server.observe.status.layers import LayerSnapshot, layer_statuses
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.observe.status.workers import WorkerRanking
from gradserve_server.resources.registry import ResourceKey

_ARRIVALS_AT_ONCE = 2_000
"""After describing so many gradients, other work of the event loop gets its turn."""
_LOOKS_AT_ONCE = 1_000
"""After looking at so many accumulators or layers likewise."""
_SNAPSHOTS_AT_ONCE = 100
"""After taking so many snapshots of accumulators likewise."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What does not change while a server runs, and what others know of it.

    Attributes:
        version: The version of its gradserve distribution.
        incarnation: The id of this run.
        device: The name of the device that ops run on.
        ops_prepared: Returns False while their kernels are being loaded or compiled.
        memory: Returns bytes in use, by purpose.
        resources: Returns how many there are of each kind of thing, and how many there may be; 0 for no limit.
        layers: Returns all layers as they are, in no particular order.
        upstream: The address to which an aggregator passes gradients on; empty for other servers.
        passed_on: Returns what an aggregator counts; see `gradserve_server.upstream.counts.Counts`.
    """

    version: str
    incarnation: str
    device: str
    ops_prepared: Callable[[], bool]
    memory: Callable[[], Iterable[MemoryStatus]]
    resources: Callable[[], Mapping[str, tuple[int, int]]]
    layers: Callable[[], Iterable[LayerSnapshot]]
    upstream: str = ""
    passed_on: Callable[[], Mapping[str, int]] = dict


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment, of which one thread makes pictures; which one makes no difference.

    Attributes:
        server: What is known of it, without accumulators, workers and layers; with all errors.
        started: When it started, by the clock of the histories.
        accumulators: Its accumulators, in no particular order.
        layers: Its layers, in no particular order.
    """

    server: ServerStatus
    started: float
    accumulators: Sequence[AccumulatorSnapshot] = ()
    layers: Sequence[LayerSnapshot] = ()
    _described: dict[tuple[ResourceKey, int], AccumulatorStatus] = field(default_factory=dict, repr=False)
    """Descriptions by key and number of rounds, which several pictures share."""

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns a picture for somebody, made in turns. Pictures share the descriptions of accumulators."""
        found = [each async for each in in_turns(self.accumulators, _LOOKS_AT_ONCE) if _is_asked_for(each, request)]
        shown, ranking = [], WorkerRanking()
        num_arrivals = 0
        for each in _ordered(found, request):
            described = self._description(each, request.max_rounds)
            shown.append(described)
            ranking.add(described)
            num_arrivals += 20 + sum([len(each.arrivals) for each in described.rounds])
            if num_arrivals >= _ARRIVALS_AT_ONCE:
                num_arrivals = 0
                await asyncio.sleep(0)
        layers, num_layers = layer_statuses([each async for each in in_turns(self.layers, _LOOKS_AT_ONCE)], request)
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


class StatusSource:
    """Takes snapshots of the server. Used on the server's event loop only."""

    def __init__(
        self,
        facts: ServerFacts,
        registry: AccumulatorRegistry,
        observed: Observed,
    ) -> None:
        """Takes what there is to see; the server starts now."""
        self.facts = facts
        self._registry = registry
        self._observed = observed
        self._histories = observed.histories
        self._started = observed.histories.totals.clock()

    @property
    def uptime(self) -> float:
        """Seconds since the server started."""
        return self._histories.totals.clock() - self._started

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns a picture of the server. The parts of a large one are not of exactly the same moment."""
        return await (await self.snapshot(request)).picture(request)

    async def snapshot(self, request: StatusRequest | None = None) -> Snapshot:
        """Returns the server as it is, or at least what a request asks for. Others get their turns meanwhile."""
        accumulators = []
        looks = in_turns(self._registry.all_owned(), _LOOKS_AT_ONCE if request else _SNAPSHOTS_AT_ONCE)
        async for key, owner, accumulator in looks:
            history = self._histories.of(key)
            if history is not None and (request is None or request.asks_for(key, owner)):
                accumulators.append(snapshot_of(key, owner, accumulator, history))
                if request is not None and len(accumulators) % _SNAPSHOTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        layers = [each async for each in in_turns(self.facts.layers(), _LOOKS_AT_ONCE)]
        return Snapshot(self._without_parts(), self._started, accumulators, layers)

    async def figures(self) -> Figures:
        """Returns what is counted, for metrics."""
        facts = self.facts
        return Figures(
            version=facts.version,
            calls=tuple([each.copy() for each in self._observed.calls]),
            traffic={name: replace(way) for name, way in self._observed.traffic.by_name().items()},
            totals=self._histories.totals.copy(),
            accumulators=accumulator_figures(self._histories),
            memory=tuple(facts.memory()),
            resources=dict(facts.resources()),
            ops_prepared=facts.ops_prepared(),
            upstream=facts.upstream,
            passed_on=dict(facts.passed_on()),
        )

    def _without_parts(self) -> ServerStatus:
        facts = self.facts
        return ServerStatus(
            version=facts.version,
            incarnation=facts.incarnation,
            uptime=self.uptime,
            device=facts.device,
            ops_prepared=facts.ops_prepared(),
            traffic=tuple(
                [
                    TrafficStatus(name, way.received, way.sent, way.calls)
                    for name, way in self._observed.traffic.by_name().items()
                ]
            ),
            memory=tuple(facts.memory()),
            methods=tuple(self._methods()),
            errors=tuple(self._errors()),
            totals=self._totals(),
        )

    def _methods(self) -> Iterable[MethodStatus]:
        for each in self._observed.calls:
            if each.started:
                yield MethodStatus(
                    service=each.service,
                    method=each.method,
                    started=each.started,
                    in_progress=each.in_progress,
                    handled=dict(each.handled),
                    working_seconds=each.working.total,
                    waiting_seconds=each.waiting.total,
                )

    def _errors(self) -> Iterable[ErrorStatus]:
        for each in self._observed.calls.errors:
            yield ErrorStatus(each.method, each.code, each.message, each.count, each.at - self._started)

    def _totals(self) -> GradientTotals:
        totals = self._histories.totals
        return GradientTotals(
            accepted=totals.accepted,
            stale=totals.stale,
            duplicate=totals.duplicate,
            refused=totals.refused,
            accepted_bytes=totals.accepted_bytes,
            rounds=totals.rounds.count,
        )


async def in_turns(items: Iterable[T], number: int) -> AsyncIterator[T]:
    """Yields items, and lets others have their turn after each `number` of them."""
    for count, item in enumerate(items, 1):
        yield item
        if count % number == 0:
            await asyncio.sleep(0)


def _is_asked_for(accumulator: AccumulatorSnapshot, request: StatusRequest) -> bool:
    return request.asks_for(accumulator.key, accumulator.owner)


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
