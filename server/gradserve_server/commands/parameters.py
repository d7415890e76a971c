"""`gradserve parameters save`, and parameters as `ls`, `show` and `rm` find and describe them."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import complete_parameters, connected, server_options, status_about
from gradserve_server.commands.what_if import better_rules
from gradserve_server.commands.wording import size, table, tell, tell_problem

if TYPE_CHECKING:
    import gradserve
    from gradserve.parameter_records import ParametersInfo, RoundRecord, WeightLedger
    from gradserve_protocol.server_status import EvaluationStatus, ParametersStatus, WeightStatus

_MOST_ROUNDS = 20
_ENOUGH = 1e-9
"""The part of all weight that may be missing because sums are rounded."""
_STEP = "{step}"
_SLOWEST_BYTES = 10e6
"""The bytes per second of the slowest transfer, whose time comes on top of --timeout."""


def rows_of(found: "Sequence[ParametersStatus]") -> list[tuple[str, ...]]:
    """Returns the cells of parameters under `HEADER`."""
    return [
        (
            each.container,
            each.name,
            str(each.step),
            f"{each.rounds_per_second:.1f}",
            f"{each.num_updates} of {each.num_required}",
            str(each.num_waiting),
            participation(each),
            str(each.stale),
            size(each.num_bytes),
            each.optimizer,
            each.rules,
        )
        for each in found
    ]


HEADER = (
    "CONTAINER",
    "NAME",
    "STEP",
    "ROUNDS/S",
    "IN ROUND",
    "WAITING",
    "WORKERS",
    "STALE",
    "MEMORY",
    "OPTIMIZER",
    "RULES",
)
RIGHT = frozenset({2, 3, 4, 5, 6, 7, 8})
"""The columns that are set flush right."""


def participation(status: "ParametersStatus") -> str:
    """Returns how many of the live workers counted in the latest round: "7 of 8"; empty if it is not known."""
    return f"{status.num_counted} of {status.num_live}" if status.num_live else ""


def find(
    client: "gradserve.Client", name: str, container: str, connect: "Callable[[], gradserve.Client]"
) -> dict[str, Any] | None:
    """Returns what `described` takes: the parameters of a name, and their latest rounds; None if there are none.

    Args:
        client: A client of their home.
        name: Their name.
        container: Their container; empty for the default one.
        connect: Connects to all servers, which sharded parameters need for the records of their rounds.
    """
    import gradserve

    place = container or "default"
    info = next((each for each in client.list_parameters(place) if each.name == name), None)
    if info is None:
        return None
    status = status_about(client, place, name)
    seen = next((each for each in status.parameters if each.name == name), None)
    # Records are those of calls by name, which private parameters have for their own client alone.
    since = max(info.step - _MOST_ROUNDS, 0)
    rounds: Sequence[RoundRecord] = ()
    problem = ""
    if info.num_shards:
        try:
            with connect() as whole:
                rounds = opened(whole, info).rounds(since)
        except gradserve.GradserveError as error:
            problem = str(error)
    elif not info.is_private:
        rounds = opened(client, info).rounds(since)
    return {
        "info": info,
        "status": seen,
        "rounds": tuple(rounds[-_MOST_ROUNDS:]),
        "problem": problem,
        "uptime": status.uptime,
    }


def opened(client: "gradserve.Client", info: "ParametersInfo") -> "gradserve.Parameters":
    """Returns existing shared parameters."""
    return client.parameters(shared_name=info.name, container=info.container)


def described(
    info: "ParametersInfo",
    status: "ParametersStatus | None",
    rounds: "Sequence[RoundRecord]",
    problem: str,
    uptime: float,
    some: Callable[[Iterable[str]], str],
) -> list[str]:
    """Returns the lines of `gradserve show parameters`.

    Args:
        info: The parameters.
        status: What the server counts of them; None if they have just been made.
        rounds: The records of their latest rounds.
        problem: Why there are no records; empty if nothing is wrong.
        uptime: The seconds since the server started.
        some: Returns names with commas between them.
    """
    components = "1 component" if len(info.components) == 1 else f"{len(info.components)} components"
    lines = [
        f"{info.container}/{info.name}: step {info.step}, {components}, {size(info.num_bytes)}, "
        + (f"sharded over {info.num_shards} servers" if info.num_shards else f"digest {info.digest}")
        + (", private to a client" if info.is_private else ""),
    ]
    if status is not None:
        lines += [
            f"optimizer: {status.optimizer}, learning rate {status.learning_rate:g}",
            f"rules: {status.rules}",
        ]
    lines += [
        f"updates: {info.update}, {_staleness(info)}, reduction {_reduction(info)}, durability {info.durability}",
        f"current round: {info.num_updates} of {info.rules.num_required} updates, {info.num_waiting} calls wait",
    ]
    if info.worker_ids:
        lines.append(f"  from {some(info.worker_ids)}")
    if status is not None and status.missing:
        lines.append(f"  missing: {some(status.missing)}")
    if status is not None and status.gone:
        lines.append(f"  gone: {some(status.gone)}")
    lines.append(weights_line(status.weights) if status is not None else _weights_of(info.weights))
    if status is not None:
        lines.append(
            f"since the server started: {status.accepted} updates accepted, {status.stale} stale, "
            f"{status.duplicate} duplicate, {status.refused} refused; {status.rounds_per_second:.1f} rounds/s"
        )
        if status.num_ended:
            ended = ", ".join([f"{count} {reason}" for reason, count in status.num_ended.items()])
            lines.append(f"rounds by the reason of their end: {ended}")
        if status.num_live:
            lines.append(f"latest round: updates of {participation(status)} live workers")
        lines += better_rules(status)
    lines += metrics_lines(rounds[-1].metrics if rounds else {}, status.evaluations if status is not None else ())
    if problem:
        lines.append(f"no records of rounds: {problem}")
    if rounds:
        newest_first = [_round(each, some) for each in reversed(rounds)]
        lines += ["", *table(_ROUND_COLUMNS, newest_first, frozenset({0, 2, 4, 5, 6, 7}))]
    return lines


def metrics_lines(of_round: Mapping[str, float], evaluations: "Sequence[EvaluationStatus]") -> list[str]:
    """Returns a line with the metrics of the latest round, and one with the latest evaluation, as far as they exist."""
    lines = [f"metrics of the latest round: {metrics_text(of_round)}"] if of_round else []
    return lines + [f"evaluation of step {each.step}: {metrics_text(each.metrics)}" for each in evaluations[-1:]]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Returns metrics with their names, in the order of these."""
    return ", ".join([f"{name} {value:g}" for name, value in sorted(metrics.items())])


def _staleness(info: "ParametersInfo") -> str:
    if not info.max_staleness:
        return "fresh ones alone"
    return f"staleness up to {info.max_staleness} ({info.staleness})"


def _reduction(info: "ParametersInfo") -> str:
    settings = ", ".join([f"{name}={value}" for name, value in vars(info.reduction).items() if value])
    return type(info.reduction).__name__ + (f"({settings})" if settings else "")


def weights_line(weights: "WeightStatus") -> str:
    """Returns the equation of weights, and by how much it is wrong, if it is."""
    parts = [f"{weights.applied:g} applied", f"{weights.pending:g} pending"]
    if weights.dropped:
        parts.append(f"{weights.dropped:g} dropped at a load")
    wrong = abs(weights.lost) > _ENOUGH * weights.accepted
    line = f"weight: {weights.accepted:g} accepted = {' + '.join(parts)}"
    line += f" + {weights.lost:g} LOST" if wrong else ""
    return line + _refused(weights.refused)


def _weights_of(weights: "WeightLedger") -> str:
    line = f"weight: {weights.accepted:g} accepted, {weights.applied:g} applied, {weights.pending:g} pending"
    return line + _refused(weights.refused)


def _refused(refused: Any) -> str:
    texts = [f"{weight:g} {reason}" for reason, weight in refused.items()]
    return f"; refused: {', '.join(texts)}" if texts else ""


_ROUND_COLUMNS = ("STEP", "ENDED", "LR", "BY", "UPDATES", "WEIGHT", "STALENESS", "REFUSED", "FROM")


def _round(record: "RoundRecord", some: Callable[[Iterable[str]], str]) -> tuple[str, ...]:
    staleness = [each.staleness for each in record.updates]
    dropped = sum(each.dropped for each in record.updates)
    return (
        str(record.step),
        datetime.fromtimestamp(record.end_time, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        f"{record.lr:g}",
        record.reason,
        f"{len(record.updates)}" + (f", {dropped} dropped" if dropped else ""),
        f"{sum(each.weight for each in record.updates):g}",
        f"up to {max(staleness)}" if any(staleness) else "0",
        str(len(record.refusals)),
        some(each.worker_id or "(no id)" for each in record.updates),
    )


@click.group()
def parameters() -> None:
    """Save parameters of a running server."""


@parameters.command()
@click.argument("name", shell_complete=complete_parameters)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--container", metavar="NAME", default="", help="the container  [default: default]")
@click.option("--optimizer/--no-optimizer", default=True, show_default=True, help="save the optimizer's state, too")
@click.option(
    "--every",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    help="save again and again, so many seconds apart, until interrupted; steps that were saved are left out",
)
@click.option(
    "--keep",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="with --every and {step} in FILE: delete all but this many of the files that the command has written",
)
@server_options
def save(
    name: str,
    file: Path,
    address: str,
    timeout: float,
    container: str,
    optimizer: bool,
    every: float | None,
    keep: int | None,
    **tls: Any,
) -> None:
    """Write the newest version of parameters NAME to FILE, in safetensors' format.

    Nobody ever sees a part of a file. In its name, {step} stands for the step of the version, so each has a file of its
    own: llm-{step}.safetensors. gradserve.load_parameters reads it.
    """
    if keep is not None and (every is None or _STEP not in file.name):
        raise click.UsageError("--keep is for --every with {step} in the name of FILE: otherwise there is one file")
    with connected(address, timeout, **tls) as client:
        place = container or "default"
        info = next((each for each in client.list_parameters(place) if each.name == name), None)
        if info is None:
            raise click.ClickException(f"no parameters {place}/{name} on {address}")
        if info.is_private:
            raise click.ClickException(f"parameters {place}/{name} are private to a client, which alone can save them")
        # Transfers take longer than questions.
        with connected(address, timeout + info.num_bytes / _SLOWEST_BYTES, **tls) as patient:
            saver = _Saver(opened(client, info), opened(patient, info), file, optimizer, keep)
            if every is None:
                saver.save()
            else:
                _save_repeatedly(saver, every)


class _Saver:
    """Saves parameters whose step has changed.

    Attributes:
        written: The files, oldest first.
    """

    def __init__(
        self,
        found: "gradserve.Parameters",
        transferred: "gradserve.Parameters",
        file: Path,
        with_optimizer: bool,
        keep: int | None,
    ) -> None:
        """`transferred` are the same parameters, of a client that waits long enough for a transfer."""
        self._found = found
        self._transferred = transferred
        self._file = file
        self._with_optimizer = with_optimizer
        self._keep = keep
        self._step: int | None = None
        self.written: list[Path] = []

    def save_if_new(self) -> None:
        """Saves the parameters, unless their step was saved before."""
        if self._found.info().step != self._step:
            self.save()

    def save(self) -> None:
        """Saves the parameters, and deletes what is no longer to be kept.

        Raises:
            click.ClickException: A file cannot be written.
        """
        # Only the file says which step it has: another round may have ended after any question.
        incomplete = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            try:
                step = self._transferred.save(incomplete, optimizer=self._with_optimizer)
                file = self._file.with_name(self._file.name.replace(_STEP, str(step)))
                num_bytes = incomplete.stat().st_size
                incomplete.replace(file)
            finally:
                incomplete.unlink(missing_ok=True)
            if file not in self.written:
                self.written.append(file)
            while self._keep is not None and len(self.written) > self._keep:
                self.written.pop(0).unlink(missing_ok=True)
        except OSError as error:
            raise click.ClickException(str(error)) from None
        self._step = step
        tell(f"{file}: step {step}, {size(num_bytes)}")


def _save_repeatedly(saver: _Saver, every: float) -> None:
    """Saves until interrupted. A server that does not answer is asked again the next time."""
    import gradserve

    due = time.monotonic()
    try:
        while True:
            try:
                saver.save_if_new()
            except (gradserve.UnavailableError, gradserve.DeadlineExceededError) as error:
                tell_problem(f"not saved: {error}")
            due = max(due + every, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
    except KeyboardInterrupt:
        return
