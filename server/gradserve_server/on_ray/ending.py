"""Ends clusters."""

import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from gradserve.discovery.ray import directory_name
from gradserve_server.on_ray.directory import LocalRay
from gradserve_server.on_ray.handles import (
    REPLY_SECONDS,
    clusters,
    directory_of,
    find_actor,
    member_indexes,
    member_name,
)

_LOOK_SECONDS = 0.05


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
    """Ends as much of a cluster as there is, also servers that were to come or go with a change of its size."""
    indexes = sorted({*range(size), *member_indexes(name)})
    members = [member for index in indexes if (member := find_actor(member_name(name, index)))]
    stopped = [member.stop.remote(timeout) for member in members]
    if timeout > 0:
        ray.wait(stopped, num_returns=len(stopped), timeout=timeout + 1)
    for member in members:
        kill(member)
    for group in (directory_name(name), *_groups_of_members(name)):
        give_back(group)
    kill(find_actor(directory_name(name)))


def end_members(name: str, first: int) -> None:
    """Ends servers that a cluster does not have, from a number on: what an interrupted change of its size has left."""
    left = [index for index in member_indexes(name) if index >= first]
    for index in left:
        kill(find_actor(member_name(name, index)))
    known = {member_name(name, index) for index in range(first)}
    for group in _groups_of_members(name):
        if group not in known:
            give_back(group)
    pause, end = threading.Event(), time.monotonic() + REPLY_SECONDS
    while any(find_actor(member_name(name, index)) is not None for index in left) and time.monotonic() < end:
        pause.wait(_LOOK_SECONDS)


def _groups_of_members(name: str) -> list[str]:
    """Returns the placement groups of servers that have come since the start of a cluster."""
    prefix = member_name(name, 0).removesuffix("0")
    groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
    return [each for each in groups if each.startswith(prefix) and each.removeprefix(prefix).isdecimal()]


def give_back(group: str) -> None:
    """Gives back what a placement group of a name has reserved, if there is one."""
    with suppress(ValueError):
        remove_placement_group(get_placement_group(group))


def kill(actor: Any) -> None:
    """Ends an actor for good, if it is there."""
    if actor is not None:
        with suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
