"""`gradserve export`: the rounds of an accumulator or of parameters, for programs that draw curves."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from gradserve_server.commands.export import targets
from gradserve_server.commands.export.rounds import Evaluation, Look, Source, Subject
from gradserve_server.commands.export.targets import Opening, Target
from gradserve_server.commands.servers import (
    AT_HOME,
    Kind,
    complete_names,
    misplaced,
    server_options,
    servers_at,
    tls_of,
)
from gradserve_server.commands.wording import tell, tell_problem
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

_INTERVAL = 10.0


@click.command()
@click.argument("kind", type=Kind(AT_HOME))
@click.argument("name", shell_complete=complete_names)
@click.option("--tensorboard", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="a run in DIR")
@click.option("--wandb", metavar="PROJECT", help="a run in a project of Weights & Biases")
@click.option(
    "--jsonl", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="a line for each round in FILE"
)
@click.option(
    "--workers/--no-workers", "with_workers", default=True, show_default=True, help="with values of single workers"
)
@click.option("--follow", is_flag=True, help="go on with every new round, until it is deleted or a signal comes")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    help=f"with --follow: seconds between two looks  [default: {_INTERVAL:g}]",
)
@click.option("--container", metavar="NAME", default="", help="the container  [default: default]")
@server_options
def export(
    kind: str,
    name: str,
    tensorboard: Path | None,
    wandb: str | None,
    jsonl: Path | None,
    with_workers: bool,
    follow: bool,
    interval: float | None,
    address: str,
    timeout: float,
    container: str,
    **tls: Any,
) -> None:
    """Write the rounds of an accumulator or of parameters NAME where curves are drawn.

    To TensorBoard, to Weights & Biases, to a file of JSON Lines, or to several of them. Each has every round once: an
    export that begins again goes on after the last round that is there.
    """
    if tensorboard is None and wandb is None and jsonl is None:
        raise click.UsageError("expected --tensorboard DIR, --wandb PROJECT or --jsonl FILE")
    if interval is not None and not follow:
        raise click.UsageError("--interval is for --follow")
    openings: list[tuple[str, Opening]] = []
    if tensorboard is not None:
        openings.append((str(tensorboard), targets.to_tensorboard(tensorboard)))
    if wandb is not None:
        openings.append((wandb, targets.to_wandb(wandb)))
    if jsonl is not None:
        openings.append((str(jsonl), targets.to_jsonl(jsonl)))
    server = _Home(address, timeout, Source(kind, container or "default", name, with_workers=with_workers), tls)
    try:
        with ExitStack() as stack:
            stopping = stack.enter_context(_until_signal()) if follow else threading.Event()
            _run(server, openings, stack, stopping, (interval or _INTERVAL) if follow else None)
    except OSError as error:
        raise click.ClickException(str(error)) from None


class _AwayError(Exception):
    """The server does not answer now."""


class _Home:
    """The server that has what is exported."""

    def __init__(self, address: str, timeout: float, source: Source, tls: dict[str, Any]) -> None:
        self._address = address
        self._timeout = timeout
        self._source = source
        self._tls = tls
        self.title = f"{source.title} on {address}"

    def look(self, since: int) -> Look | None:
        """Returns what the server keeps; None if it has no such thing.

        Makes a connection for each look: servers may start again elsewhere, and the size of a cluster decides the home.

        Raises:
            _AwayError: The server does not answer, cannot be looked up, or is another one than the address says.
            click.ClickException: It has refused a call.
        """
        silence_grpc()
        import gradserve

        try:
            servers = servers_at(self._address, self._timeout)
        except SettingsError:
            raise
        except click.ClickException as error:
            raise _AwayError(error.message) from None
        at = self._source.home(len(servers))
        tls = tls_of(**self._tls)
        try:
            with gradserve.connect(servers[at], timeout=self._timeout, tls=tls) as client:
                if len(servers) > 1 and (problem := misplaced(client.server_info().member, at, len(servers))):
                    raise _AwayError(f"server {at} at {servers[at]}: {problem}")
                return self._source.look(
                    client, partial(gradserve.connect, servers, timeout=self._timeout, tls=tls), since
                )
        except gradserve.InvalidArgumentError as error:
            raise SettingsError(error.message) from None
        except (gradserve.UnavailableError, gradserve.DeadlineExceededError) as error:
            raise _AwayError(f"{servers[at]}: {error}") from None
        except gradserve.GradserveError as error:
            raise click.ClickException(f"{servers[at]}: {error}") from None


def _run(
    home: _Home,
    openings: Sequence[tuple[str, Opening]],
    stack: ExitStack,
    stopping: threading.Event,
    interval: float | None,
) -> None:
    """Exports once, or with an interval again and again."""
    try:
        look = home.look(0)
    except _AwayError as error:
        raise click.ClickException(str(error)) from None
    if look is None:
        raise click.ClickException(f"no {home.title}")
    writers = []
    for place, opening in openings:
        target = opening(look.subject)
        stack.callback(target.close)
        writers.append(_Writer(place, target))
    settling = _Settling()
    _write(writers, look, settling)
    if interval is not None:
        _follow(home, look.subject, writers, settling, stopping, interval)
    for writer in writers:
        writer.write_evaluations(settling.latest)
        tell(writer.summary)


def _follow(
    home: _Home,
    subject: Subject,
    writers: "Sequence[_Writer]",
    settling: "_Settling",
    stopping: threading.Event,
    interval: float,
) -> None:
    """Writes what is new again and again. After the signal that ends it, looks once more."""
    is_away = is_last = False
    while not is_last:
        is_last = stopping.wait(interval)
        try:
            look = home.look(min(writer.step for writer in writers))
        except _AwayError as error:
            if not is_away:
                tell_problem(f"no answer, will ask again: {error}")
            is_away = True
            continue
        is_away = False
        if look is None or look.subject != subject:
            tell_problem(f"{home.title} was deleted")
            return
        _write(writers, look, settling)


def _write(writers: "Sequence[_Writer]", look: Look, settling: "_Settling") -> None:
    evaluations = settling.of(look)
    for writer in writers:
        writer.write_rounds(look)
        writer.write_evaluations(evaluations)


class _Writer:
    """A target, and what was written to it."""

    def __init__(self, place: str, target: Target) -> None:
        self._place = place
        self._target = target
        self._num_rounds = 0
        self._num_evaluations = 0

    @property
    def step(self) -> int:
        """The step of the last round; 0 for none."""
        return self._target.last.step if self._target.last is not None else 0

    @property
    def summary(self) -> str:
        """The numbers of rounds and evaluations that were written."""
        return f"{self._place}: {self._num_rounds} rounds, {self._num_evaluations} evaluations"

    def write_rounds(self, look: Look) -> None:
        """Writes the rounds that the target does not have, and says which are lost."""
        rounds, num_lost = look.after(self._target.last)
        if num_lost:
            tell_problem(f"{self._place}: {num_lost} rounds before step {rounds[0].step} are lost: no longer kept")
        elif rounds and self._target.last is None and rounds[0].step > 1:
            tell_problem(f"{self._place}: begins with step {rounds[0].step}: no earlier rounds are kept")
        self._target.write(rounds)
        self._num_rounds += len(rounds)

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Writes the evaluations that the target does not have."""
        new = [each for each in evaluations if not self._target.has_evaluation(each.step)]
        self._target.write_evaluations(new)
        self._num_evaluations += len(new)


class _Settling:
    """Finds the evaluations to which reports are no longer added: two looks have found the same.

    Attributes:
        latest: All evaluations of the latest look.
    """

    def __init__(self) -> None:
        self.latest: Sequence[Evaluation] = ()

    def of(self, look: Look) -> Sequence[Evaluation]:
        """Returns the evaluations of a look that are those of the look before."""
        before = {each.step: each for each in self.latest}
        self.latest = look.evaluations
        return [each for each in look.evaluations if each.equals(before.get(each.step))]


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Yields what SIGINT or SIGTERM sets. A second signal ends the process."""
    stopping = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        stopping.set()
        give_back()

    for number in before:
        signal.signal(number, stop)
    try:
        yield stopping
    finally:
        give_back()
