"""Ends clusters."""

from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, remove_placement_group

from gradserve.discovery.ray_names import directory_name
from gradserve_server.on_ray.directory import LocalRay
from gradserve_server.on_ray.handles import REPLY_SECONDS, clusters, directory_of, find_actor, member_name


def stop_cluster(name: str, timeout: float) -> LocalRay | None:
    """Ends a cluster: its servers in order, then its actors. Returns the Ray that is left to end with it, if any.

    Args:
        name: The name of the cluster.
        timeout: Seconds that the servers have to end in order; those that have not are killed.

    Raises:
        ClusterError: There is no such cluster.
    """
    directory = directory_of(name)
    size = len(ray.get(directory.addresses.remote(), timeout=REPLY_SECONDS))
    local_ray: LocalRay | None = ray.get(directory.local_ray.remote(), timeout=REPLY_SECONDS)
    end_cluster(name, size, timeout)
    return None if clusters() else local_ray


def end_cluster(name: str, size: int, timeout: float) -> None:
    """Ends as much of a cluster as there is."""
    members = [member for index in range(size) if (member := find_actor(member_name(name, index)))]
    stopped = [member.stop.remote(timeout) for member in members]
    if timeout > 0:
        ray.wait(stopped, num_returns=len(stopped), timeout=timeout + 1)
    for member in members:
        kill(member)
    for group in (directory_name(name), *(member_name(name, index) for index in range(size))):
        give_back(group)
    kill(find_actor(directory_name(name)))


def give_back(group: str) -> None:
    """Gives back what a placement group of a name has reserved, if there is one."""
    with suppress(ValueError):
        remove_placement_group(get_placement_group(group))


def kill(actor: Any) -> None:
    """Ends an actor for good, if it is there."""
    if actor is not None:
        with suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
