"""`gradserve` and `python -m gradserve`: the command line, which is part of the server."""

import sys


def main() -> None:
    """Runs the command line; where the server is not installed, says how to install it."""
    try:
        import gradserve_server  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"gradserve: {error}")
    from gradserve_server.cli import cli

    cli()


if __name__ == "__main__":
    main()
