"""Clusters on Ray: starts, inspects and stops them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradserve.discovery.ray import NAMESPACE, connected_to_ray, directory_name
from gradserve.errors import UnavailableError
from gradserve_ray.directory import (
    ClusterError,
    ClusterPlan,
    Directory,
    Heard,
    LocalRay,
    MemberState,
    SeenMember,
)
from gradserve_ray.local_ray import LOOPBACK, runs_here
from gradserve_ray.member import (
    REPLY_SECONDS,
    Member,
    clusters,
    directory_of,
    find_actor,
    inherited_local_ray,
    member_indexes,
    member_name,
)
from gradserve_ray.supervision import REPORT_SECONDS

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.2
_FOREVER = -1
_SILENT_AFTER_SECONDS = 3 * REPORT_SECONDS


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


def start_cluster(plan: ClusterPlan, local_ray: LocalRay | None) -> list[str]:
    """Starts a cluster on the Ray that this process is connected to, and returns the addresses of its servers.

    Returns when all of them serve. If they do not, everything that was started is ended.

    Args:
        plan: The cluster.
        local_ray: The Ray, if it was started for this cluster.

    Raises:
        ClusterError: There is a cluster of this name, Ray has no room for it, or a server does not start.
    """
    if find_actor(directory_name(plan.name)) is not None:
        raise ClusterError(f"a cluster {plan.name!r} is there already; `gradserve cluster down {plan.name}` ends it")
    end = time.monotonic() + plan.timeout
    local_ray = local_ray or inherited_local_ray()
    group = reserve(plan, plan.servers, directory_name(plan.name))
    try:
        directory = _start_directory(plan, local_ray)
        # A Ray of this machine alone needs no servers that others reach.
        host = LOOPBACK if local_ray else None
        place = MemberPlace(plan, directory, host)
        members = [start_member(place, index, group, index) for index in range(plan.servers)]
        wait_until_running(directory, plan.timeout, end)
        addresses: list[str] = ray.get(directory.addresses.remote(), timeout=REPLY_SECONDS)
        del members  # Detached: they go on without their handles.
    except BaseException:
        end_cluster(plan.name, plan.servers, timeout=0)
        raise
    return addresses


def look_at_cluster(name: str) -> tuple[SeenMember, ...]:
    """Returns the servers of a cluster in their order.

    Raises:
        ClusterError: There is no such cluster.
    """
    directory = directory_of(name)  # Methods do not keep their actor's handle.
    heard: list[Heard] = ray.get(directory.members.remote(), timeout=REPLY_SECONDS)
    return tuple(_seen(each) for each in heard)


def _seen(heard: Heard) -> SeenMember:
    record = heard.record
    is_silent = heard.age is not None and heard.age > _SILENT_AFTER_SECONDS and record.pid != 0
    state = "silent" if is_silent else record.state.value
    return SeenMember(record.index, record.address, record.node, record.pid, state, record.restarts, record.problem)


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


def reserve(plan: ClusterPlan, servers: int, name: str) -> Any:
    """Reserves resources for a number of servers in a placement group of a name; returns the group.

    Raises:
        ClusterError: Ray has no room for them within the plan's timeout.
    """
    bundle = {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
    group = placement_group([bundle] * servers, strategy="SPREAD", name=name, lifetime="detached")
    if not group.wait(plan.timeout):
        remove_placement_group(group)
        free = ray.available_resources()
        raise ClusterError(
            f"Ray had no room for {servers} servers with {_resources(bundle)} each within {plan.timeout:g} s; "
            f"{_resources({kind: free.get(kind, 0) for kind in bundle})} are free"
        )
    return group


def _resources(counts: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in counts.items())


def _start_directory(plan: ClusterPlan, local_ray: LocalRay | None) -> Any:
    actor = ray.remote(Directory).options(
        name=directory_name(plan.name),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=_FOREVER,
        max_task_retries=_FOREVER,
    )
    return actor.remote(plan.servers, local_ray, plan)


@dataclass(frozen=True)
class MemberPlace:
    """Settings that all servers of a cluster share.

    Attributes:
        plan: The cluster.
        directory: The handle of its directory.
        host: The address on which all of them listen; None for that of each node.
    """

    plan: ClusterPlan
    directory: Any
    host: str | None


def start_member(place: MemberPlace, index: int, group: Any, bundle: int) -> Any:
    """Starts the actor of a server in a bundle of a placement group; returns its handle.

    The actor starts the server once the directory counts it as part of the cluster.
    """
    plan = place.plan
    actor = ray.remote(Member).options(
        name=member_name(plan.name, index),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_restarts=_FOREVER,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    flags = ("--http-listen", "off", *plan.flags, "--cluster", plan.name, "--cluster-index", str(index))
    return actor.remote(place.directory, index, place.host, flags, plan.state_dir)


def wait_until_running(directory: Any, timeout: float, end: float) -> None:
    """Waits until all servers run.

    Args:
        directory: The handle of the directory.
        timeout: The seconds that they have, for messages.
        end: When they are over, by the monotonic clock.

    Raises:
        ClusterError: One has ended, or they do not run in time.
    """
    pause = threading.Event()
    while True:
        remaining = max(end - time.monotonic(), 1.0)
        members: list[Heard] = ray.get(directory.members.remote(), timeout=remaining)
        waiting = [each.record for each in members if each.record.state is not MemberState.RUNNING]
        if not waiting:
            return
        for record in waiting:
            if record.problem:
                raise ClusterError(f"server {record.index} has ended: {record.problem}")
        if time.monotonic() > end:
            numbers = ", ".join(str(record.index) for record in waiting)
            raise ClusterError(f"servers that do not serve within {timeout:g} s: {numbers}")
        pause.wait(_LOOK_SECONDS)


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
        pause.wait(_POLL_SECONDS)


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
    """Ends an actor, if there is one, without letting Ray restart it."""
    if actor is not None:
        with suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
