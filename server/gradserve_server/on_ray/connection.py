"""The connection of a command to Ray."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError

from gradserve.discovery.ray import connected_to_ray
from gradserve.errors import UnavailableError
from gradserve_server.on_ray.errors import ClusterError
from gradserve_server.on_ray.local_ray import runs_here


@contextmanager
def command_on_ray(address: str | None) -> Iterator[None]:
    """Connects a command to Ray until the end of the block, and turns Ray's errors into its own.

    Args:
        address: Where Ray's head is; None for the Ray that runs on this machine.

    Raises:
        ClusterError: There is no such Ray, its token is missing or wrong, or it has not answered.
    """
    if address is None and not runs_here():  # Ray would look for the one before, for a minute.
        raise ClusterError("no Ray runs on this machine; `gradserve cluster up` starts one, --address names another")
    try:
        with connected_to_ray(address):
            yield
    except UnavailableError as error:
        raise ClusterError(str(error)) from None
    except RayError as error:
        raise ClusterError(f"Ray: {error}") from None
