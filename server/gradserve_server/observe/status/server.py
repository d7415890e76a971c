"""Takes pictures of the server."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from typing import Any

from gradserve.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    GradientTotals,
    LayerStatus,
    MemoryStatus,
    MethodStatus,
    ServerStatus,
    TrafficStatus,
)
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.observe.observed import Observed
from gradserve_server.observe.rounds.history import History
from gradserve_server.observe.status.accumulators import accumulator_status
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.observe.status.workers import WorkerRanking
from gradserve_server.resources import ResourceKey

_ARRIVALS_AT_ONCE = 2_000
"""After describing so many gradients, other work of the event loop gets its turn."""
_LOOKS_AT_ONCE = 1_000
"""After looking at so many accumulators likewise."""

_Found = tuple[ResourceKey, Accumulator, History]


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What does not change while a server runs, and what others know of it.

    Attributes:
        version: The version of its gradserve distribution.
        incarnation: The id of this run.
        device: The name of the device that ops run on.
        ops_prepared: Returns whether their kernels are there.
        memory: Returns bytes in use, by purpose.
        resources: Returns how many there are of each kind of thing, and how many there may be; 0 for no limit.
        layers: Returns the layers that a request asks for, or the first of many, and their number.
        upstream: The address to which an aggregator passes gradients on; empty for other servers.
        passed_on: Returns what an aggregator counts; see `gradserve_server.upstream.counts.Counts`.
    """

    version: str
    incarnation: str
    device: str
    ops_prepared: Callable[[], bool]
    memory: Callable[[], Iterable[MemoryStatus]]
    resources: Callable[[], Mapping[str, tuple[int, int]]]
    layers: Callable[[StatusRequest], tuple[Sequence[LayerStatus], int]]
    upstream: str = ""
    passed_on: Callable[[], Mapping[str, int]] = dict


class StatusSource:
    """Takes pictures of the server. Used on the event loop only."""

    def __init__(
        self,
        facts: ServerFacts,
        registry: AccumulatorRegistry,
        observed: Observed,
    ) -> None:
        """Takes what there is to see; the server starts now."""
        self.facts = facts
        self._registry = registry
        self._histories = observed.histories
        self._calls = observed.calls
        self._traffic = observed.traffic
        self._started = observed.histories.totals.clock()

    @property
    def uptime(self) -> float:
        """Seconds since the server started."""
        return self._histories.totals.clock() - self._started

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns a picture of the server. The parts of a large one are not of exactly the same moment."""
        found = await self._found(request)
        shown, ranking = [], WorkerRanking()
        num_arrivals = 0
        for key, accumulator, history in _ordered(found, request):
            described = accumulator_status(key, accumulator, history, self._started, request.max_rounds)
            shown.append(described)
            ranking.add(described)
            num_arrivals += 20 + sum([len(each.arrivals) for each in described.rounds])
            if num_arrivals >= _ARRIVALS_AT_ONCE:
                num_arrivals = 0
                await asyncio.sleep(0)
        return self._with_accumulators(request, tuple(shown), ranking, len(found))

    def _with_accumulators(
        self, request: StatusRequest, shown: tuple[AccumulatorStatus, ...], ranking: WorkerRanking, count: int
    ) -> ServerStatus:
        facts, user = self.facts, request.user
        layers, num_layers = facts.layers(request)
        return ServerStatus(
            version=facts.version,
            incarnation=facts.incarnation,
            uptime=self.uptime,
            device=facts.device,
            ops_prepared=facts.ops_prepared(),
            num_accumulators=count,
            accumulators=shown,
            workers=ranking.ranked(request.max_workers),
            traffic=tuple(
                [
                    TrafficStatus(name, way.received, way.sent, way.calls)
                    for name, way in self._traffic.by_name().items()
                ]
            ),
            memory=tuple(facts.memory()),
            layers=tuple(layers),
            num_layers=num_layers,
            methods=tuple(self._methods()),
            errors=tuple(self._errors()) if user.reaches_all else (),
            totals=self._totals(),
        )

    async def _found(self, request: StatusRequest) -> list[_Found]:
        """Returns the accumulators that a request asks for, in no particular order."""
        found = []
        for number, (key, accumulator) in enumerate(self._registry.all_reached(request.user)):
            if number % _LOOKS_AT_ONCE == _LOOKS_AT_ONCE - 1:
                await asyncio.sleep(0)
            history = self._histories.of(key)
            if history is not None and request.asks_for(key):
                found.append((key, accumulator, history))
        return found

    def _methods(self) -> Iterable[MethodStatus]:
        for each in self._calls:
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
        for each in self._calls.errors:
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


def _ordered(found: list[_Found], request: StatusRequest) -> list[_Found]:
    count = request.max_accumulators
    match request.order:
        case Order.NAME:
            return nsmallest(count, found, key=_name)
        case Order.RATE:
            return nlargest(count, found, key=lambda each: each[2].rounds_per_second)
        case Order.WAITING:
            return nlargest(count, found, key=lambda each: len(each[1].queue))
        case Order.BYTES:
            return nlargest(count, found, key=lambda each: each[1].num_bytes)
        case Order.LATEST:
            return nsmallest(count, found, key=lambda each: (-each[2].last_round_ended, _name(each)))


def _name(found: _Found) -> tuple[Any, ...]:
    return found[0].container, found[0].name
