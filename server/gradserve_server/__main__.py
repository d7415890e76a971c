"""`gradserve` and `python -m gradserve_server`."""

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from gradserve_server.cli import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gradserve"):
            raise
        sys.exit(f"gradserve: {error.name} is not installed; install the server with: pip install 'gradserve[server]'")
    cli()


if __name__ == "__main__":
    main()
