"""The panels of a picture as text."""

from collections.abc import Mapping
from typing import TypeAlias

from gradserve_protocol.printing import visible
from gradserve_protocol.server_status import AccumulatorStatus, ParametersStatus, RoundStatus, ServerStatus
from gradserve_server.commands.parameters import metrics_lines, participation, weights_line
from gradserve_server.commands.top.picture import Picture, Rates, whole
from gradserve_server.commands.what_if import better_rules
from gradserve_server.commands.wording import block, compared_weights, duration, size, table

Listed: TypeAlias = AccumulatorStatus | ParametersStatus
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
    parts = [headline(address, status, None)]
    if status.accumulators or not status.parameters:
        parts.append(accumulators_table(status))
    if status.parameters:
        parts.append(parameters_table(status))
    parts.append(workers_panel(status))
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


def parameters_table(status: ServerStatus) -> str:
    """Returns the parameters, with the columns of the terminal program, and below them their metrics."""
    rows = [(full_name(each), *cells(each)) for each in status.parameters]
    lines = table(("PARAMETERS", *COLUMNS[1:]), rows, frozenset(range(1, len(COLUMNS))))
    more = status.num_parameters - len(rows)
    measured = [f"{full_name(each)}: {line}" for each in status.parameters for line in _measured(each)]
    return block((*lines, *((f"and {more:,} more",) if more > 0 else ()), *measured))


def full_name(each: Listed) -> str:
    """Returns the name of an accumulator or of parameters, with the container if that is not the default one."""
    return each.name if each.container == "default" else f"{each.container}/{each.name}"


def cells(each: Listed) -> tuple[str, ...]:
    """Returns what stands beside the name of an accumulator or of parameters, as `COLUMNS` says."""
    if isinstance(each, ParametersStatus):
        step, gathered = each.step, each.num_updates
    else:
        step, gathered = each.global_step, each.num_accumulated
    return (
        f"{step:,}",
        f"{each.rounds_per_second:.1f}",
        f"{gathered}/{each.num_required}" if each.num_required else str(gathered),
        str(each.num_waiting),
        str(each.stale),
        duration(each.median_round_seconds) if each.median_round_seconds else "",
        size(each.num_bytes),
    )


def parameters_lines(each: ParametersStatus) -> list[str]:
    """Returns what parameters have beside their rounds: optimizer, rules, weights, workers, and their metrics."""
    lines = [f"{each.optimizer}, learning rate {each.learning_rate:g}; {each.rules}", weights_line(each.weights)]
    if each.num_live:
        lines.append(f"latest round: updates of {participation(each)} live workers")
    return lines + _measured(each)


def _measured(each: ParametersStatus) -> list[str]:
    latest = next((found for found in reversed(each.rounds) if found.ended), None)
    return metrics_lines(latest.metrics if latest is not None else {}, each.evaluations)


def rounds_panel(listed: Listed | None, uptime: float) -> str:
    """Returns the last rounds of an accumulator or of parameters: each a line with every gradient's place in time.

    A dot is a gradient, a figure several, an exclamation mark one that came too late.
    """
    if listed is None:
        return "No accumulators. They appear here as soon as a worker makes one."
    above = parameters_lines(listed) if isinstance(listed, ParametersStatus) else compared_weights(listed)
    rounds = listed.rounds[-_MOST_ROUNDS:]
    if not rounds:
        return block((*above, f"{listed.name}: no round has ended yet."))
    longest = max(_length(each) for each in rounds) or 1e-9
    lines = [*above, f"{listed.name}: from the first gradient of a round, {duration(longest)} to the right edge"]
    for each in reversed(rounds):
        ended = f"{duration(max(uptime - each.ended, 0.0))} ago" if each.ended else "open"
        lines.append(f"{each.step:>8} {_timeline(each, longest)} {ended:>13}  {_remark(each)}")
    return block((*lines, *better_rules(listed)))


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
            rows.append((str(each.index), each.address, "no answer", "", "", "", "", "", "", each.problem))
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
                f"{status.num_parameters:,}",
                *(("", "", "") if rates is None else flow),
                size(next((part.num_bytes for part in status.memory if part.purpose == "all tensors"), 0)),
                "",
            )
        )
    header = ("SERVER", "ADDRESS", "UP", "ACCUMULATORS", "PARAMETERS", "ROUNDS/S", "IN", "OUT", "TENSORS", "PROBLEM")
    return block(table(header, rows, frozenset({0, 2, 3, 4, 5, 6, 7, 8})))


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
    if described.reason not in ("", "required"):
        parts.append(f"ended by its {described.reason}" if described.reason != "expected" else "all expected have come")
    if staleness := max([each.staleness for each in in_time], default=0):
        parts.append(f"up to {staleness} stale")
    if late:
        parts.append(f"too late: {_few(late)}")
    if described.missing:
        parts.append(f"{'missing' if described.ended else 'not here yet'}: {_few(list(described.missing))}")
    return "; ".join(parts)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
