"""Asks Ray where the servers of a cluster are. Needs the extra `ray`."""

import math
import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gradserve.discovery.ray_connection import connected_to_ray
from gradserve.discovery.ray_names import NAMESPACE, directory_name
from gradserve.errors import DeadlineExceededError, NotFoundError, UnavailableError

_LOOK_SECONDS = 0.2


def addresses_on_ray(cluster: str, timeout: float) -> list[str]:
    """Returns the addresses of the servers of a cluster, in their order. Waits until all of them have been up.

    Uses the process's connection to Ray. If it has none, it is connected for as long as this takes.

    Args:
        cluster: The name of the cluster.
        timeout: Seconds to wait; math.inf for no limit.

    Raises:
        NotFoundError: There is no cluster of this name.
        UnavailableError: There is no Ray, or it refuses this process.
        DeadlineExceededError: Not all servers have been up in time.
    """
    end = time.monotonic() + timeout
    try:
        with connected_to_ray():
            return _look_up(cluster, timeout, end)
    except GetTimeoutError:
        raise DeadlineExceededError(f"the directory of cluster {cluster!r} on Ray did not answer in time") from None
    except RayError as error:
        raise UnavailableError(f"Ray does not tell where cluster {cluster!r} is: {error}") from None


def _look_up(cluster: str, timeout: float, end: float) -> list[str]:
    try:
        directory: Any = ray.get_actor(directory_name(cluster), namespace=NAMESPACE)
    except ValueError:
        raise NotFoundError(
            f"no cluster {cluster!r} on this Ray: `gradserve cluster up --name {cluster} --servers N` starts one",
            field="address",
        ) from None
    pause = threading.Event()
    while True:
        remaining = end - time.monotonic()
        waiting = None if remaining == math.inf else max(remaining, _LOOK_SECONDS)
        addresses: list[str] = ray.get(directory.addresses.remote(), timeout=waiting)
        missing = [str(index) for index, each in enumerate(addresses) if not each]
        if not missing:
            return addresses
        if remaining <= 0:
            raise DeadlineExceededError(
                f"after {timeout:g} s, these of the {len(addresses)} servers of cluster {cluster!r} are not up yet: "
                f"{', '.join(missing)}; `gradserve cluster status {cluster}` shows what they are doing"
            )
        pause.wait(_LOOK_SECONDS)
