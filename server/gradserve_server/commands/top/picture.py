"""Pictures of servers at work, and those of a cluster joined to one."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    GradientTotals,
    MemoryStatus,
    MethodStatus,
    ParametersStatus,
    RoundStatus,
    ServerStatus,
    TrafficStatus,
    WorkerStatus,
)
from gradserve_server.commands.servers import Answer

PartT = TypeVar("PartT", GradientTotals, MemoryStatus, MethodStatus, TrafficStatus, WorkerStatus)
StatusT = TypeVar("StatusT", AccumulatorStatus, ParametersStatus)


@dataclass(frozen=True)
class Rates:
    """Rates per second between two pictures; zero for the first picture and after a restart.

    Attributes:
        rounds: Rounds of all accumulators and parameters.
        gradients: Accepted gradients and updates.
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
            rounds=(_all(now).rounds - _all(before).rounds) / seconds,
            gradients=(_all(now).accepted - _all(before).accepted) / seconds,
            received={each.way: (each.received_bytes - old.received_bytes) / seconds for each, old in pairs},
            sent={each.way: (each.sent_bytes - old.sent_bytes) / seconds for each, old in pairs},
            calls={
                (each.service, each.method): (each.started - earlier_methods.get((each.service, each.method), 0))
                / seconds
                for each in now.methods
            },
        )


def _all(status: ServerStatus) -> GradientTotals:
    """Returns the counts of accumulators and parameters together."""
    return _sum([status.totals, status.update_totals])


Picture = Sequence[Answer[ServerStatus]]
"""The answers of all servers, in the order of the servers."""


def whole(picture: Picture, order: str = "latest") -> ServerStatus:
    """Returns one picture of all servers that have answered.

    Counts and bytes are sums. Times are those of the server that has run for the longest, and so is the uptime: each
    server counts its own. The incarnation changes when another server answers, or a restarted one.

    Args:
        picture: The pictures. One that is alone is returned as it is.
        order: The order of accumulators and parameters, as `server_status` takes it.
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
        traffic=_sums((each for status in statuses for each in status.traffic), "way"),
        memory=_sums((each for status in statuses for each in status.memory), "purpose"),
        layers=tuple(each for status in statuses for each in status.layers),
        methods=_methods(each for status in statuses for each in status.methods),
        errors=_errors(shifted),
        totals=totals(statuses),
        num_layers=sum(status.num_layers for status in statuses),
        parameters=_sorted([each for status in statuses for each in status.parameters], order),
        num_parameters=sum(status.num_parameters for status in statuses),
        update_totals=update_totals(statuses),
    )


def totals(statuses: Iterable[ServerStatus]) -> GradientTotals:
    """Returns the gradients and rounds of several servers."""
    return _sum([GradientTotals(), *(status.totals for status in statuses)])


def update_totals(statuses: Iterable[ServerStatus]) -> GradientTotals:
    """Returns the updates and rounds of parameters of several servers."""
    return _sum([GradientTotals(), *(status.update_totals for status in statuses)])


def _grouped(parts: Iterable[PartT], *keys: str) -> Iterable[list[PartT]]:
    groups: dict[tuple[object, ...], list[PartT]] = defaultdict(list)
    for each in parts:
        groups[tuple(getattr(each, key) for key in keys)].append(each)
    return groups.values()


def _sum(parts: Sequence[PartT], *other: str) -> PartT:
    """Returns the sum of some parts; the `other` fields are those of the first."""
    names = [each.name for each in fields(parts[0]) if each.name not in other]
    return replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


def _shifted(status: ServerStatus, by: float) -> ServerStatus:
    """Returns a status whose times are `by` seconds later, as those of a server that started earlier."""

    def later(described: RoundStatus) -> RoundStatus:
        ended = described.ended + by if described.ended else 0.0
        return replace(described, began=described.began + by, ended=ended)

    return replace(
        status,
        accumulators=tuple(
            replace(each, rounds=tuple(later(described) for described in each.rounds)) for each in status.accumulators
        ),
        parameters=tuple(
            replace(each, rounds=tuple(later(described) for described in each.rounds)) for each in status.parameters
        ),
        workers=tuple(replace(each, last_seen=each.last_seen + by) for each in status.workers),
        errors=tuple(replace(each, at=each.at + by) for each in status.errors),
    )


def _sorted(found: list[StatusT], order: str) -> tuple[StatusT, ...]:
    keys: Mapping[str, Callable[[StatusT], Any]] = {
        "latest": lambda each: -max((described.ended for described in each.rounds), default=0.0),
        "name": lambda each: (each.container, each.name),
        "rate": lambda each: -each.rounds_per_second,
        "waiting": lambda each: -each.num_waiting,
        "bytes": lambda each: -each.num_bytes,
    }
    return tuple(sorted(found, key=keys[order]))


def _sums(parts: Iterable[PartT], key: str) -> tuple[PartT, ...]:
    return tuple(_sum(each, key) for each in _grouped(parts, key))


def _workers(workers: Iterable[WorkerStatus]) -> tuple[WorkerStatus, ...]:
    merged = []
    for parts in _grouped(workers, "worker_id"):
        worker = _sum(parts, "worker_id", "mean_lateness", "last_seen")
        lateness = sum(part.mean_lateness * part.rounds for part in parts) / max(worker.rounds, 1)
        merged.append(replace(worker, mean_lateness=lateness, last_seen=max(part.last_seen for part in parts)))
    return tuple(sorted(merged, key=lambda each: -each.waited_for))


def _methods(methods: Iterable[MethodStatus]) -> tuple[MethodStatus, ...]:
    merged = []
    for parts in _grouped(methods, "service", "method"):
        handled = Counter[str]()
        for part in parts:
            handled.update(part.handled)
        merged.append(replace(_sum(parts, "service", "method", "handled"), handled=dict(handled)))
    return tuple(merged)


def _errors(statuses: list[tuple[int, ServerStatus]]) -> tuple[ErrorStatus, ...]:
    errors = [
        replace(each, message=f"server {index}: {each.message}") for index, status in statuses for each in status.errors
    ]
    return tuple(sorted(errors, key=lambda each: -each.at))


def _named(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
