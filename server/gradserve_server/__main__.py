"""`gradserve` and `python -m gradserve_server`: the command line."""

import atexit
import gc
import signal
import sys
from typing import NoReturn


def _serves(arguments: list[str]) -> bool:
    """Answers `gradserve health` if a server serves; False if the command has to do it."""
    try:
        from gradserve_server.rpc.health.check import line_if_serving

        line = line_if_serving(arguments)
    except ModuleNotFoundError:  # The command says which extra is missing.
        return False
    if line is not None:
        sys.stdout.write(f"{line}\n")
    return line is not None


def _run(arguments: list[str]) -> NoReturn:
    """Runs `gradserve run` without the other commands, whose imports would take longer than the start of a worker."""
    try:
        from gradserve_server.commands.run.command import run
    except ModuleNotFoundError as error:
        from gradserve_protocol.extras import install_command

        sys.exit(f"gradserve: gradserve run needs {error.name}; install it with: {install_command('server')}")
    sys.exit(run(arguments, prog_name="gradserve run"))


def main() -> None:
    """Runs the command line; if the server's extra is not installed, says how to install it."""
    signals = None
    if sys.argv[1:2] == ["serve"]:
        # First, because imports may take seconds: signals wait until a handler is installed.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        from gradserve_server.runtime.process import StopSignals

        signals = StopSignals()
    if sys.argv[1:2] == ["health"] and _serves(sys.argv[2:]):
        return
    if sys.argv[1:2] == ["run"]:
        _run(sys.argv[2:])
    from gradserve_protocol.extras import MissingExtraError, require

    try:
        require("server")
    except MissingExtraError as error:
        sys.exit(f"gradserve: {error}")
    from gradserve_server.runtime.process import importing

    # As it ends, the interpreter would look for garbage in all that was imported: a quarter of a second.
    atexit.register(gc.freeze)
    with importing():
        from gradserve_server.commands.cli import cli
    cli(obj=signals)


if __name__ == "__main__":
    main()
