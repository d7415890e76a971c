"""Starts clusters."""

import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradserve.discovery.ray import NAMESPACE, directory_name
from gradserve_server.on_ray.directory import Directory, Heard, LocalRay, MemberState
from gradserve_server.on_ray.ending import end_cluster
from gradserve_server.on_ray.errors import ClusterError
from gradserve_server.on_ray.handles import REPLY_SECONDS, find_actor, inherited_local_ray, member_name
from gradserve_server.on_ray.local_ray import LOOPBACK
from gradserve_server.on_ray.member import Member
from gradserve_server.on_ray.plan import ClusterPlan

_LOOK_SECONDS = 0.2
_FOREVER = -1


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
    """What the servers of a cluster have in common.

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

    The actor starts the server if the directory knows that the cluster has so many.
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
