"""`python -m gradserve_server`."""

from gradserve_server.cli import cli

if __name__ == "__main__":
    cli()
