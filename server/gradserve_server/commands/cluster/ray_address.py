"""The Ray that a command talks to."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from gradserve_server.runtime.extras import install_command

ray_address_option = click.option(
    "--address",
    metavar="RAY_ADDRESS",
    envvar="RAY_ADDRESS",
    help="Ray, as HOST:PORT of its head; by default the Ray that runs on this machine.",
)


@contextmanager
def ray_errors() -> Iterator[None]:
    """Turns errors of clusters, and a missing extra, into messages."""
    from gradserve_server.on_ray.directory import ClusterError

    try:
        yield
    except ClusterError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise click.ClickException(f"clusters need Ray; install it with: {install_command('ray')}") from None
