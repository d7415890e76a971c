"""`gradserve` and `python -m gradserve_server`: the command line."""

import signal
import sys


def main() -> None:
    """Runs the command line; if the server's extra is not installed, says how to install it."""
    signals = None
    if sys.argv[1:2] == ["serve"]:
        # First, because imports may take seconds: signals wait until a handler is installed.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        from gradserve_server.signals import StopSignals

        signals = StopSignals()
    from gradserve_server.extras import MissingExtraError, require

    try:
        require("server")
    except MissingExtraError as error:
        sys.exit(f"gradserve: {error}")
    from gradserve_server.cli import cli

    cli(obj=signals)


if __name__ == "__main__":
    main()
