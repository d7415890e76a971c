"""The `demo` command."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from gradserve_demo.options import DemoError, DemoOptions
from gradserve_protocol.extras import install_command
from gradserve_server.commands.wording import ExitCode
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

_DEFAULTS = DemoOptions()
_EXTRA_MODULES = ("matplotlib", "rich", "sklearn")


@click.command()
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=_DEFAULTS.workers,
    show_default=True,
    help="Gradients that every round needs, each from its own worker process.",
)
@click.option(
    "--backup",
    type=click.IntRange(min=0),
    default=_DEFAULTS.backup,
    show_default=True,
    help="Additional worker processes; the last one is artificially slow.",
)
@click.option(
    "--kill",
    is_flag=True,
    help="Kill a worker in the middle of the training, and start it again: it reads the newest version and goes on.",
)
@click.option(
    "--diloco",
    is_flag=True,
    help="Let each worker train by itself for 10 steps, and push then what has changed.",
)
@click.option(
    "--batch-norm",
    is_flag=True,
    help="Let the server compute the hidden layer: batch normalization and relu instead of tanh.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=_DEFAULTS.epochs,
    show_default=True,
    help="Passes over the training data.",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Use the server at HOST:PORT, several with commas between them, or the cluster gradserve+ray://NAME. "
    "Without it, a server is started for the demo.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=_DEFAULTS.output,
    show_default=True,
    help="Folder for the plot.",
)
def demo(
    workers: int,
    backup: int,
    kill: bool,
    diloco: bool,
    batch_norm: bool,
    epochs: int,
    address: str | None,
    output: Path,
) -> None:
    """Train a network on handwritten digits with several processes.

    The server holds the weights: the workers read them and push gradients, and the server takes the steps. Then one
    process does the same training, and the two results are compared: without backup workers the weights must be equal
    within 1e-5, also if a worker is killed; with backup workers or --diloco only the accuracy is compared. The exit
    code is 1 if the results differ.

    With --batch-norm all workers share a layer on the server, while the one process normalises in NumPy. Beta, gamma
    and the moving averages must be equal too.
    """
    if batch_norm and (backup or kill or diloco):
        option = "--backup" if backup else "--kill" if kill else "--diloco"
        raise click.UsageError(f"--batch-norm needs every worker in every step: it cannot be used with {option}")
    silence_grpc()
    import gradserve
    from gradserve.discovery import servers_to_connect

    try:
        if address is not None:  # A cluster is looked up once, not by each worker.
            address = ",".join(map(str, servers_to_connect(address, _DEFAULTS.timeout)))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(f"--address: {error.message}") from None
    except gradserve.GradserveError as error:
        raise click.ClickException(str(error)) from None
    try:
        from rich.console import Console

        from gradserve_demo.coordinator import run_demo
        from gradserve_demo.report import render
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRA_MODULES:
            raise click.ClickException(
                f"the demo needs {error.name}; install it with: {install_command('demo')}"
            ) from None
        raise
    console = Console()
    options = DemoOptions(
        workers=workers,
        backup=backup,
        kill=kill,
        diloco=diloco,
        batch_norm=batch_norm,
        epochs=epochs,
        address=address,
        output=output,
    )
    try:
        with _sigterm_as_exit():
            report = run_demo(options, console=console)
    except (DemoError, gradserve.GradserveError, OSError) as error:
        raise click.ClickException(str(error)) from error
    console.print(render(report))
    if report.problem is not None:
        sys.exit(ExitCode.FAILED)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Lets SIGTERM end the demo like Ctrl-C, after its server and workers have ended."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
