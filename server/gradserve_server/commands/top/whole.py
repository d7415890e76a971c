"""Several servers as one: a picture of a cluster at work."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    GradientTotals,
    MemoryStatus,
    MethodStatus,
    RoundStatus,
    ServerStatus,
    TrafficStatus,
    WorkerStatus,
)
from gradserve_server.commands.servers import Answer


@dataclass(frozen=True)
class Rates:
    """Rates per second between two pictures; zero for the first picture and after a restart.

    Attributes:
        rounds: Rounds of all accumulators.
        gradients: Accepted gradients.
        received: Bytes received, by way.
        sent: Bytes sent, by way.
        calls: Calls, by service and method.
    """

    rounds: float = 0.0
    gradients: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def between(cls, before: ServerStatus | None, now: ServerStatus) -> "Rates":
        """Returns the rates between two pictures, of which the first may be missing."""
        if before is None or before.incarnation != now.incarnation or now.uptime <= before.uptime:
            return cls()
        seconds = now.uptime - before.uptime
        earlier_ways = {each.way: each for each in before.traffic}
        earlier_methods = {(each.service, each.method): each.started for each in before.methods}
        pairs = [(each, earlier_ways[each.way]) for each in now.traffic if each.way in earlier_ways]
        return cls(
            rounds=(now.totals.rounds - before.totals.rounds) / seconds,
            gradients=(now.totals.accepted - before.totals.accepted) / seconds,
            received={each.way: (each.received_bytes - old.received_bytes) / seconds for each, old in pairs},
            sent={each.way: (each.sent_bytes - old.sent_bytes) / seconds for each, old in pairs},
            calls={
                (each.service, each.method): (each.started - earlier_methods.get((each.service, each.method), 0))
                / seconds
                for each in now.methods
            },
        )


Picture = Sequence[Answer[ServerStatus]]
"""The pictures of the servers, as far as they have answered, in the order of the servers."""


def whole(picture: Picture, order: str = "latest") -> ServerStatus:
    """Returns one picture of all servers that have answered.

    Counts and bytes are sums. Times are those of the server that has run for the longest, and so is the uptime: each
    server counts its own. The incarnation changes when another server answers, or a restarted one.

    Args:
        picture: The pictures. One that is alone is returned as it is.
        order: The order of accumulators, as `server_status` takes it.
    """
    seen = [(each.index, each.value) for each in picture if each.value is not None]
    if len(picture) == 1 and seen:
        return seen[0][1]
    uptime = max((status.uptime for _, status in seen), default=0.0)
    shifted = [(index, _shifted(status, uptime - status.uptime)) for index, status in seen]
    statuses = [status for _, status in shifted]
    return ServerStatus(
        version=_named(status.version for status in statuses),
        incarnation=" ".join(f"{index}:{status.incarnation}" for index, status in shifted),
        uptime=uptime,
        device=_named(status.device for status in statuses),
        ops_prepared=all(status.ops_prepared for status in statuses),
        num_accumulators=sum(status.num_accumulators for status in statuses),
        accumulators=_sorted([each for status in statuses for each in status.accumulators], order),
        workers=_workers(each for status in statuses for each in status.workers),
        traffic=_traffic(each for status in statuses for each in status.traffic),
        memory=_memory(each for status in statuses for each in status.memory),
        layers=tuple(each for status in statuses for each in status.layers),
        methods=_methods(each for status in statuses for each in status.methods),
        errors=_errors(shifted),
        totals=totals(statuses),
        num_layers=sum(status.num_layers for status in statuses),
    )


def totals(statuses: Iterable[ServerStatus]) -> GradientTotals:
    """Returns the gradients and rounds of several servers."""
    parts = [status.totals for status in statuses]
    return GradientTotals(
        **{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(GradientTotals)}
    )


def _shifted(status: ServerStatus, by: float) -> ServerStatus:
    """Returns a picture whose times are those of a server that has started so many seconds earlier."""

    def later(described: RoundStatus) -> RoundStatus:
        ended = described.ended + by if described.ended else 0.0
        return replace(described, began=described.began + by, ended=ended)

    return replace(
        status,
        accumulators=tuple(
            replace(each, rounds=tuple(later(described) for described in each.rounds)) for each in status.accumulators
        ),
        workers=tuple(replace(each, last_seen=each.last_seen + by) for each in status.workers),
        errors=tuple(replace(each, at=each.at + by) for each in status.errors),
    )


def _sorted(accumulators: list[AccumulatorStatus], order: str) -> tuple[AccumulatorStatus, ...]:
    keys = {
        "latest": lambda each: -max((described.ended for described in each.rounds), default=0.0),
        "name": lambda each: (each.container, each.name),
        "rate": lambda each: -each.rounds_per_second,
        "waiting": lambda each: -each.num_waiting,
        "bytes": lambda each: -each.num_bytes,
    }
    return tuple(sorted(accumulators, key=keys[order]))


def _workers(workers: Iterable[WorkerStatus]) -> tuple[WorkerStatus, ...]:
    by_id: dict[str, list[WorkerStatus]] = defaultdict(list)
    for each in workers:
        by_id[each.worker_id].append(each)
    merged = [
        WorkerStatus(
            worker_id=worker_id,
            rounds=sum(part.rounds for part in parts),
            mean_lateness=sum(part.mean_lateness * part.rounds for part in parts)
            / max(sum(part.rounds for part in parts), 1),
            times_last=sum(part.times_last for part in parts),
            waited_for=sum(part.waited_for for part in parts),
            stale=sum(part.stale for part in parts),
            missed=sum(part.missed for part in parts),
            last_seen=max(part.last_seen for part in parts),
        )
        for worker_id, parts in by_id.items()
    ]
    return tuple(sorted(merged, key=lambda each: -each.waited_for))


def _traffic(traffic: Iterable[TrafficStatus]) -> tuple[TrafficStatus, ...]:
    merged: dict[str, TrafficStatus] = {}
    for each in traffic:
        before = merged.get(each.way, TrafficStatus(each.way))
        merged[each.way] = replace(
            before,
            received_bytes=before.received_bytes + each.received_bytes,
            sent_bytes=before.sent_bytes + each.sent_bytes,
            calls=before.calls + each.calls,
        )
    return tuple(merged.values())


def _memory(memory: Iterable[MemoryStatus]) -> tuple[MemoryStatus, ...]:
    merged: dict[str, MemoryStatus] = {}
    for each in memory:
        before = merged.get(each.purpose, MemoryStatus(each.purpose))
        merged[each.purpose] = replace(
            before, num_bytes=before.num_bytes + each.num_bytes, max_bytes=before.max_bytes + each.max_bytes
        )
    return tuple(merged.values())


def _methods(methods: Iterable[MethodStatus]) -> tuple[MethodStatus, ...]:
    merged: dict[tuple[str, str], MethodStatus] = {}
    for each in methods:
        before = merged.get((each.service, each.method), MethodStatus(each.service, each.method))
        codes = (*before.handled, *each.handled)
        merged[each.service, each.method] = replace(
            before,
            started=before.started + each.started,
            in_progress=before.in_progress + each.in_progress,
            handled={code: before.handled.get(code, 0) + each.handled.get(code, 0) for code in codes},
            working_seconds=before.working_seconds + each.working_seconds,
            waiting_seconds=before.waiting_seconds + each.waiting_seconds,
        )
    return tuple(merged.values())


def _errors(statuses: list[tuple[int, ServerStatus]]) -> tuple[ErrorStatus, ...]:
    errors = [
        replace(each, message=f"server {index}: {each.message}") for index, status in statuses for each in status.errors
    ]
    return tuple(sorted(errors, key=lambda each: -each.at))


def _named(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
