"""Pictures of servers at work: those of a cluster joined to one, and the panels of a picture as text."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from gradserve_protocol.printing import visible
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
from gradserve_server.commands.wording import block, duration, size, table

PartT = TypeVar("PartT", GradientTotals, MemoryStatus, MethodStatus, TrafficStatus, WorkerStatus)


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
"""The answers of all servers, in the order of the servers."""


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
        traffic=_sums((each for status in statuses for each in status.traffic), "way"),
        memory=_sums((each for status in statuses for each in status.memory), "purpose"),
        layers=tuple(each for status in statuses for each in status.layers),
        methods=_methods(each for status in statuses for each in status.methods),
        errors=_errors(shifted),
        totals=totals(statuses),
        num_layers=sum(status.num_layers for status in statuses),
    )


def totals(statuses: Iterable[ServerStatus]) -> GradientTotals:
    """Returns the gradients and rounds of several servers."""
    return _sum([GradientTotals(), *(status.totals for status in statuses)])


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


COLUMNS = ("NAME", "STEP", "ROUNDS/S", "IN ROUND", "WAIT", "STALE", "ROUND", "MEMORY")
_BAR = 28
_MOST_ROUNDS = 8


def headline(address: str, status: ServerStatus, rates: Rates | None) -> str:
    """Returns a line about the whole server; without rates if they are not known yet."""
    line = f"{address}  gradserve {status.version}  up {duration(status.uptime)}  {status.device}"
    if rates is not None:
        received, sent = sum(rates.received.values()), sum(rates.sent.values())
        line += f"  {rates.rounds:.1f} rounds/s  in {size(received)}/s  out {size(sent)}/s"
    return visible(line)


def plain_text(address: str, picture: Picture) -> str:
    """Returns one picture of a server or a cluster as text, for output that is no terminal."""
    status = whole(picture)
    parts = [headline(address, status, None), accumulators_table(status), workers_panel(status)]
    if len(picture) > 1:
        parts.insert(1, servers_panel(picture, None))
    return "\n\n".join(parts)


def accumulators_table(status: ServerStatus) -> str:
    """Returns the accumulators, with the columns of the terminal program."""
    if not status.accumulators:
        return "No accumulators."
    rows = [(full_name(each), *cells(each)) for each in status.accumulators]
    lines = table(COLUMNS, rows, frozenset(range(1, len(COLUMNS))))
    more = status.num_accumulators - len(rows)
    return block((*lines, *((f"and {more:,} more",) if more > 0 else ())))


def full_name(each: AccumulatorStatus) -> str:
    """Returns the name of an accumulator, with its container if that is not the default one."""
    return each.name if each.container == "default" else f"{each.container}/{each.name}"


def cells(each: AccumulatorStatus) -> tuple[str, ...]:
    """Returns what stands beside the name of an accumulator, as `COLUMNS` says."""
    return (
        f"{each.global_step:,}",
        f"{each.rounds_per_second:.1f}",
        f"{each.num_accumulated}/{each.num_required}" if each.num_required else str(each.num_accumulated),
        str(each.num_waiting),
        str(each.stale),
        duration(each.median_round_seconds) if each.median_round_seconds else "",
        size(each.num_bytes),
    )


def rounds_panel(accumulator: AccumulatorStatus | None, uptime: float) -> str:
    """Returns the last rounds of an accumulator: each a line, on which every gradient has its place in time.

    A dot is a gradient, a figure several, an exclamation mark one that came too late.
    """
    if accumulator is None:
        return "No accumulators. They appear here as soon as a worker makes one."
    rounds = accumulator.rounds[-_MOST_ROUNDS:]
    if not rounds:
        return visible(f"{accumulator.name}: no round has ended yet.")
    longest = max(_length(each) for each in rounds) or 1e-9
    lines = [f"{accumulator.name}: from the first gradient of a round, {duration(longest)} to the right edge"]
    for each in reversed(rounds):
        ended = f"{duration(max(uptime - each.ended, 0.0))} ago" if each.ended else "open"
        lines.append(f"{each.step:>8} {_timeline(each, longest)} {ended:>13}  {_remark(each)}")
    return block(lines)


def workers_panel(status: ServerStatus) -> str:
    """Returns the workers, those for which others wait longest first."""
    if not status.workers:
        return "No workers with an id. Give worker_id=... to push_pull or apply_grad, and see who is slow."
    rows = [
        (
            each.worker_id,
            str(each.rounds),
            duration(each.mean_lateness),
            str(each.times_last),
            duration(each.waited_for),
            str(each.stale),
            str(each.missed),
            f"{duration(max(status.uptime - each.last_seen, 0.0))} ago",
        )
        for each in status.workers
    ]
    header = ("WORKER", "ROUNDS", "AFTER FIRST", "LAST", "WAITED FOR", "TOO LATE", "MISSED", "SEEN")
    return block(table(header, rows, frozenset(range(1, 8))))


def server_panel(status: ServerStatus, rates: Rates) -> str:
    """Returns bytes by way, memory by purpose, and the calls that take most of the time."""
    ways = [
        (
            each.way,
            f"{size(rates.received.get(each.way, 0.0))}/s",
            f"{size(rates.sent.get(each.way, 0.0))}/s",
            f"{each.calls:,}",
        )
        for each in status.traffic
    ]
    memory = [
        (each.purpose, size(each.num_bytes), size(each.max_bytes) if each.max_bytes else "")
        for each in status.memory
        if each.num_bytes or each.max_bytes
    ]
    methods = [
        (
            each.method,
            f"{rates.calls.get((each.service, each.method), 0.0):.1f}",
            duration(each.working_seconds / max(each.started - each.in_progress, 1)),
            duration(each.waiting_seconds),
            f"{sum(count for code, count in each.handled.items() if code != 'OK'):,}",
            str(each.in_progress),
        )
        for each in sorted(status.methods, key=lambda each: -each.working_seconds)[:10]
    ]
    calls = ("CALL", "PER S", "WORK EACH", "WAITED IN ALL", "FAILED", "NOW")
    return block(
        (
            *table(("WAY", "IN", "OUT", "CALLS"), ways, frozenset({1, 2, 3})),
            "",
            *table(("MEMORY", "IN USE", "LIMIT"), memory, frozenset({1, 2})),
            "",
            *table(calls, methods, frozenset(range(1, 6))),
        )
    )


def servers_panel(picture: Picture, rates: Mapping[int, Rates] | None) -> str:
    """Returns the servers of a cluster: what each has and does (without rates if unknown), or why it is silent."""
    rows = []
    for each in picture:
        status = each.value
        if status is None:
            rows.append((str(each.index), each.address, "no answer", "", "", "", "", "", each.problem))
            continue
        found = Rates() if rates is None else rates.get(each.index, Rates())
        flow = (
            f"{found.rounds:.1f}",
            f"{size(sum(found.received.values()))}/s",
            f"{size(sum(found.sent.values()))}/s",
        )
        rows.append(
            (
                str(each.index),
                each.address,
                duration(status.uptime),
                f"{status.num_accumulators:,}",
                *(("", "", "") if rates is None else flow),
                size(next((part.num_bytes for part in status.memory if part.purpose == "all tensors"), 0)),
                "",
            )
        )
    header = ("SERVER", "ADDRESS", "UP", "ACCUMULATORS", "ROUNDS/S", "IN", "OUT", "TENSORS", "PROBLEM")
    return block(table(header, rows, frozenset({0, 2, 3, 4, 5, 6, 7})))


def errors_panel(status: ServerStatus) -> str:
    """Returns the latest errors of calls."""
    if not status.errors:
        return "No call has failed, or you may not see which: that needs the role of an admin in all containers."
    rows = [
        (
            f"{duration(max(status.uptime - each.at, 0.0))} ago",
            f"{each.count:,}x",
            each.method.rpartition(".")[2],
            each.code,
            each.message,
        )
        for each in status.errors
    ]
    return block(table(("LATEST", "COUNT", "CALL", "CODE", "MESSAGE"), rows, frozenset({1})))


def _length(described: RoundStatus) -> float:
    last = max([each.after for each in described.arrivals], default=0.0)
    return max(last, described.ended - described.began if described.ended else 0.0)


def _timeline(described: RoundStatus, longest: float) -> str:
    counts, late = [0] * _BAR, [False] * _BAR
    for each in described.arrivals:
        at = min(int(each.after / longest * _BAR), _BAR - 1)
        counts[at] += 1
        late[at] = late[at] or each.stale
    return "".join(
        "!" if is_late else "·" if not count else "●" if count == 1 else str(count) if count < 10 else "#"
        for count, is_late in zip(counts, late, strict=True)
    )


def _remark(described: RoundStatus) -> str:
    in_time = [each for each in described.arrivals if not each.stale]
    late = [each.worker_id or "(no id)" for each in described.arrivals if each.stale]
    parts = []
    if described.ended and len(in_time) > 1:
        parts.append(f"last: {in_time[-1].worker_id or '(no id)'}")
    if late:
        parts.append(f"too late: {_few(late)}")
    if described.missing:
        parts.append(f"{'missing' if described.ended else 'not here yet'}: {_few(list(described.missing))}")
    return "; ".join(parts)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
