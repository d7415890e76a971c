"""The source of a server's status and metrics, on the server's event loop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gradserve_protocol.server_status import (
    ErrorStatus,
    EvaluationStatus,
    GradientTotals,
    MemoryStatus,
    MethodStatus,
    ParametersStatus,
    RequestStatus,
    ServerStatus,
    TrafficStatus,
    WeightStatus,
)
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.rounds import KEPT_ROUNDS
from gradserve_server.observe.calls import Histogram, MethodCalls, Way
from gradserve_server.observe.observed import Observed, UpdateHistory
from gradserve_server.observe.rounds import Histories, Totals
from gradserve_server.observe.status.snapshot import (
    MOST_WORKERS,
    LayerSnapshot,
    RoundsSnapshot,
    Snapshot,
    StatusRequest,
    snapshot_of,
    some_of,
)
from gradserve_server.parameters.ledger import LOADED, WeightLedger
from gradserve_server.parameters.optimizers import name_of
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.resources.runs import Runs, run_of
from gradserve_server.runtime.event_loop import InTurns, Turn
from gradserve_server.storage.backup_schedule import BackupFigures

MOST_ACCUMULATORS = 100
"""The most accumulators with separate metrics: those whose rounds began or ended last, excluding internal ones."""
MOST_PARAMETERS = 100
"""The most parameters with separate metrics."""
_SNAPSHOT_ITEMS = 3
"""The items of a turn in whose time one accumulator is described."""
_PARAMETERS_ITEMS = 6
"""The same for parameters."""


class DiskFigures(NamedTuple):
    """The disk of a state directory.

    Attributes:
        free: The bytes that the server can still write.
        total: All its bytes.
    """

    free: int
    total: int


def disk_of(path: Path) -> DiskFigures | None:
    """Returns the disk of a state directory; None if the directory is gone, which its next record will notice."""
    try:
        found = shutil.disk_usage(path)
    except OSError:
        return None
    return DiskFigures(found.free, found.total)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """A server's constant facts, and functions that return what other parts of it know.

    Attributes:
        version: The version of its gradserve distribution.
        incarnation: The id of this run.
        device: The name of the device that ops run on.
        ops_prepared: Returns False while the kernels of ops are being loaded or compiled.
        memory: Returns bytes in use, by purpose.
        resources: Returns the number of things of each kind, and its limit; 0 for no limit.
        layers: Returns snapshots of all layers, in no particular order.
        upstream: The address to which an aggregator forwards gradients; empty for other servers.
        passed_on: Returns the counts of an aggregator; see `gradserve_server.upstream.batches.Counts`.
        member: The server's place in its cluster; None if it is in none.
        uptime: Returns the seconds since the start.
        http_url: Returns the address of the status page; empty if there is none.
        backups: Returns what is known of the server's backups; None if it takes none.
        disk: Returns the free bytes and all bytes of the disk of the state directory; None without one. It may wait for
            the file system.
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
    member: Member | None = None
    uptime: Callable[[], float] = float
    http_url: Callable[[], str] = str
    backups: Callable[[], BackupFigures | None] = lambda: None
    disk: Callable[[], DiskFigures | None] = lambda: None


class StatusSource:
    """Takes snapshots of the server. Used on the server's event loop only."""

    def __init__(
        self,
        facts: ServerFacts,
        registry: AccumulatorRegistry,
        parameters: ParametersRegistry,
        observed: Observed,
        runs: Runs,
    ) -> None:
        self.facts = facts
        self._runs = runs
        self._registry = registry
        self._parameters = parameters
        self._observed = observed
        self._histories = observed.histories
        self._started = observed.histories.totals.clock()

    @property
    def uptime(self) -> float:
        """Seconds since the server started."""
        return self._histories.totals.clock() - self._started

    async def picture(self, request: StatusRequest) -> ServerStatus:
        """Returns the status of the server. The parts of a large one are from slightly different moments."""
        return await (await self.snapshot(request)).picture(request)

    async def snapshot(self, request: StatusRequest | None = None) -> Snapshot:
        """Returns a snapshot of the server, or of the part that a request covers. Other tasks get turns in between."""
        accumulators = []
        requests = []
        call = None if request is None else request.call
        turn = Turn()
        for key, owner, accumulator in self._registry.all_owned():
            await turn.spend()
            history = self._histories.of(key)
            if history is not None and (request is None or request.asks_for(key, owner)):
                await turn.spend(_SNAPSHOT_ITEMS)
                accumulators.append(snapshot_of(key, owner, accumulator, history))
                if call is not None:
                    requests.append(_request_status("accumulator", key, accumulator.outcome_of(call)))
        found = []
        for key, owner, parameters in self._parameters.all_owned():
            await turn.spend()
            updates = self._observed.updates.of(key)
            if updates is not None and (request is None or request.asks_for(key, owner)):
                await turn.spend(_PARAMETERS_ITEMS)
                found.append(parameters_snapshot(key, owner, parameters, updates))
                if call is not None:
                    requests.append(_request_status("parameters", key, parameters.ledger.outcome_of(call)))
        layers = [each async for each in InTurns(self.facts.layers())]
        known = [each for each in requests if each.outcome]
        return Snapshot(self._without_parts(), self._started, accumulators, layers, found, known, self._runs.past)

    async def figures(self) -> Figures:
        """Returns the metrics of the server."""
        facts = self.facts
        return Figures(
            version=facts.version,
            calls=tuple([each.copy() for each in self._observed.calls]),
            traffic={name: replace(way) for name, way in self._observed.traffic.by_name().items()},
            totals=self._histories.totals.copy(),
            update_totals=self._observed.updates.rounds.totals.copy(),
            applying=self._observed.updates.applying.copy(),
            accumulators=accumulator_figures(self._histories),
            parameters=tuple(self._parameters_figures()),
            memory=tuple(facts.memory()),
            resources=dict(facts.resources()),
            ops_prepared=facts.ops_prepared(),
            upstream=facts.upstream,
            passed_on=dict(facts.passed_on()),
            backups=facts.backups(),
            disk=await asyncio.to_thread(facts.disk),
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
            totals=gradient_totals(self._histories.totals),
            update_totals=gradient_totals(self._observed.updates.rounds.totals),
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

    def _parameters_figures(self) -> Iterable[ParametersFigures]:
        """Yields the metrics of the parameters whose rounds began or ended last."""
        existing = dict(self._parameters.all())
        for history in islice(self._observed.updates.latest(), MOST_PARAMETERS):
            parameters = existing.get(history.key)
            if parameters is not None:
                yield parameters_figures(parameters, history)


def _request_status(kind: str, key: ResourceKey, found: tuple[str, int]) -> RequestStatus:
    return RequestStatus(key.container, key.name, kind, *found)


def gradient_totals(totals: Totals) -> GradientTotals:
    """Returns the counts that a status has."""
    return GradientTotals(
        accepted=totals.accepted,
        stale=totals.stale,
        duplicate=totals.duplicate,
        refused=totals.refused,
        accepted_bytes=totals.accepted_bytes,
        rounds=totals.rounds.count,
    )


@dataclass(frozen=True, slots=True)
class AccumulatorFigures:
    """Metrics of one accumulator.

    Attributes:
        container: Its container.
        name: Its name.
        num_rounds: The rounds that have ended.
        stale: Its stale gradients.
        last_round_age: Seconds since its last round ended; None if none has.
        open_round_age: Seconds since the first gradient of its current round; 0 while it has none.
        median_round_seconds: The median time from the first gradient of its last rounds to their ends; 0 without any.
        num_different: The workers whose parameters are not those of most.
        num_compared: The workers that were compared for that.
    """

    container: str
    name: str
    num_rounds: int
    stale: int
    last_round_age: float | None
    open_round_age: float
    median_round_seconds: float
    num_different: int
    num_compared: int


@dataclass(frozen=True, kw_only=True)
class ParametersFigures:
    """Metrics of parameters.

    Attributes:
        container: Their container.
        name: Their name.
        step: The step of the newest version.
        num_updates: The updates in the current round.
        num_required: The updates that it needs.
        num_waiting: The calls that wait.
        num_bytes: The memory of versions, the optimizer's state and updates.
        num_ended: The rounds that have ended, by the reason of their end.
        last_round_age: Seconds since the last round ended; None if none has.
        open_round_age: Seconds since the first update of the current round; 0 while it has none.
        median_round_seconds: The median time from the first update of the last rounds to their ends; 0 without any.
        weights: Where all weight went.
        participation: The share of live workers with an update in the latest round; None if it is not known.
        learning_rate: The learning rate of the current round.
        metrics: The means of the metrics of the latest round.
        evaluation: What was measured of the newest version of which somebody has reported.
    """

    container: str
    name: str
    step: int
    num_updates: int
    num_required: int
    num_waiting: int
    num_bytes: int
    num_ended: Mapping[str, int]
    last_round_age: float | None
    open_round_age: float
    median_round_seconds: float
    weights: WeightStatus
    participation: float | None
    learning_rate: float
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Metrics of the whole server at one moment. They are copies, so other threads may read them.

    Attributes:
        version: The version of the server.
        calls: The calls of each method.
        traffic: Bytes and calls by transport.
        totals: Counts of gradients and rounds.
        update_totals: Counts of updates and rounds of parameters.
        applying: Seconds that the optimizer took in each round.
        accumulators: The accumulators whose rounds began or ended last.
        parameters: The parameters whose rounds began or ended last.
        memory: Bytes in use, by purpose.
        resources: The number of things of each kind, and its limit; 0 for no limit.
        ops_prepared: False while the kernels of ops are being loaded or compiled.
        upstream: The address to which an aggregator forwards gradients; empty for other servers.
        passed_on: The counts of an aggregator.
        backups: What is known of the server's backups; None if it takes none.
        disk: The disk of the state directory; None without one.
    """

    version: str
    calls: tuple[MethodCalls, ...]
    traffic: Mapping[str, Way]
    totals: Totals
    update_totals: Totals
    applying: Histogram
    accumulators: tuple[AccumulatorFigures, ...]
    parameters: tuple[ParametersFigures, ...]
    memory: tuple[MemoryStatus, ...]
    resources: Mapping[str, tuple[int, int]]
    ops_prepared: bool
    upstream: str
    passed_on: Mapping[str, int]
    backups: BackupFigures | None = None
    disk: DiskFigures | None = None


def parameters_figures(parameters: Parameters, history: UpdateHistory) -> ParametersFigures:
    """Returns the metrics of parameters."""
    snapshot = parameters_snapshot(history.key, "", parameters, history)
    status, now = snapshot.status, history.now
    return ParametersFigures(
        container=status.container,
        name=status.name,
        step=status.step,
        num_updates=status.num_updates,
        num_required=status.num_required,
        num_waiting=status.num_waiting,
        num_bytes=status.num_bytes,
        num_ended=status.num_ended,
        last_round_age=now - history.last_round_ended if history.rounds else None,
        open_round_age=now - history.times[0] if history.times else 0.0,
        median_round_seconds=history.median_round_seconds,
        weights=status.weights,
        participation=status.num_counted / status.num_live if status.num_live else None,
        learning_rate=status.learning_rate,
        metrics=parameters.metrics,
        evaluation=status.evaluations[-1].metrics if status.evaluations else {},
    )


def accumulator_figures(histories: Histories) -> tuple[AccumulatorFigures, ...]:
    """Returns the metrics of the accumulators whose rounds began or ended last."""
    now = histories.totals.clock()
    of_users = (each for each in histories.latest() if run_of(each.key.name) is None)
    return tuple(
        [
            AccumulatorFigures(
                each.key.container,
                each.key.name,
                each.num_rounds,
                each.stale,
                now - each.last_round_ended if each.rounds else None,
                now - each.times[0] if each.times else 0.0,
                each.median_round_seconds,
                each.num_different,
                each.num_compared,
            )
            for each in islice(of_users, MOST_ACCUMULATORS)
        ]
    )


def parameters_snapshot(
    key: ResourceKey, owner: str, parameters: Parameters, history: UpdateHistory
) -> RoundsSnapshot[ParametersStatus]:
    """Returns a snapshot of parameters with their history."""
    ledger, rounds = parameters.ledger, parameters.rounds
    participation = ledger.participation
    missing = list(islice(ledger.closer.missing, MOST_WORKERS))
    evaluations = ledger.evaluations.latest(KEPT_ROUNDS)
    status = ParametersStatus(
        container=key.container,
        name=key.name,
        step=rounds.global_step,
        num_rounds=history.num_rounds,
        rounds_per_second=history.rounds_per_second,
        num_updates=rounds.num_accumulated,
        num_required=ledger.closer.rules.num_required,
        num_waiting=parameters.num_waiting,
        num_bytes=parameters.num_bytes,
        accepted=history.accepted,
        stale=history.stale,
        duplicate=history.duplicate,
        refused=history.refused,
        workers=some_of(rounds.members.workers),
        missing=tuple([each for each in missing if ledger.is_alive(each)]),
        gone=tuple([each for each in missing if not ledger.is_alive(each)]),
        optimizer=optimizer_text(ledger.round_rules.optimizer),
        learning_rate=parameters.learning_rate,
        rules=rules_text(ledger.round_rules.rounds),
        weights=weight_status(ledger.weights),
        num_counted=0 if participation is None else participation.num_counted,
        num_live=0 if participation is None else participation.num_live,
        num_ended=dict(history.reasons),
        evaluations=tuple([EvaluationStatus(each.step, each.metrics) for each in evaluations]),
    )
    current = tuple(history.workers), tuple(history.times), tuple(history.staleness)
    return RoundsSnapshot(key, owner, status, rounds.global_step, tuple(history.rounds), *current)


def optimizer_text(optimizer: Optimizer) -> str:
    """Returns an optimizer in words: its name in the contract and the settings that are not 0."""
    settings = [
        f"{name}={value if isinstance(value, bool) else f'{value:g}'}"
        for name, value in vars(optimizer).items()
        if value
    ]
    return f"{name_of(optimizer)}({', '.join(settings)})"


def rules_text(rules: RoundRules) -> str:
    """Returns the rules for the end of a round in words."""
    parts = [f"{rules.num_required} update" + ("s" if rules.num_required != 1 else "")]
    if rules.grace == "adaptive":
        parts.append(f"adaptive grace up to {rules.max_grace:g} s")
    elif rules.grace:
        parts.append(f"grace {rules.grace:g} s")
    if rules.expected is not None:
        parts.append("expected: " + ("all live workers" if rules.expected == "alive" else f"{rules.expected}"))
    if rules.min_interval:
        parts.append(f"every {rules.min_interval:g} s at most")
    if rules.deadline is not None:
        parts.append(f"deadline {rules.deadline:g} s")
        if rules.min_required is not None:
            parts[-1] += f" with {rules.min_required}"
    return ", ".join(parts)


def weight_status(weights: WeightLedger) -> WeightStatus:
    """Returns a copy of where all weight went."""
    refused = {reason: weight for reason, weight in weights.refused.items() if reason != LOADED}
    return WeightStatus(weights.accepted, weights.applied, weights.pending, weights.dropped, refused)
