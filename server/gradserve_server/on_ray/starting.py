"""Starts clusters."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradserve.discovery.ray_names import NAMESPACE, directory_name
from gradserve_server.on_ray.directory import Directory, Heard, LocalRay, MemberState
from gradserve_server.on_ray.ending import end_cluster
from gradserve_server.on_ray.errors import ClusterError
from gradserve_server.on_ray.handles import REPLY_SECONDS, find_actor, inherited_local_ray, member_name
from gradserve_server.on_ray.local_ray import LOOPBACK
from gradserve_server.on_ray.member import Member

_LOOK_SECONDS = 0.2
_FOREVER = -1


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster that is to run.

    Attributes:
        name: Its name.
        servers: The number of servers.
        cpus: The CPUs of Ray that each of them reserves.
        gpus: The GPUs that each has.
        state_dir: The folder of their state directories; None for servers that are not durable.
        flags: Further flags of `gradserve serve`.
        timeout: Seconds that starting may take.
    """

    name: str
    servers: int
    cpus: float
    gpus: float
    state_dir: Path | None
    flags: tuple[str, ...]
    timeout: float


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
    group = _reserve(plan)
    try:
        directory = _start_directory(plan, local_ray)
        # A Ray of this machine alone needs no servers that others reach.
        host = LOOPBACK if local_ray else None
        members = [_start_member(plan, index, host, directory, group) for index in range(plan.servers)]
        _wait(plan, directory, end)
        addresses: list[str] = ray.get(directory.addresses.remote(), timeout=REPLY_SECONDS)
        del members  # Detached: they go on without their handles.
    except BaseException:
        end_cluster(plan.name, plan.servers, timeout=0)
        raise
    return addresses


def _reserve(plan: ClusterPlan) -> Any:
    bundle = {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
    group = placement_group(
        [bundle] * plan.servers, strategy="SPREAD", name=directory_name(plan.name), lifetime="detached"
    )
    if not group.wait(plan.timeout):
        remove_placement_group(group)
        free = ray.available_resources()
        raise ClusterError(
            f"Ray had no room for {plan.servers} servers with {_resources(bundle)} each within {plan.timeout:g} s; "
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
    return actor.remote(plan.servers, local_ray)


def _start_member(plan: ClusterPlan, index: int, host: str | None, directory: Any, group: Any) -> Any:
    actor = ray.remote(Member).options(
        name=member_name(plan.name, index),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_restarts=_FOREVER,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    )
    place = ("--cluster", plan.name, "--cluster-index", str(index), "--cluster-size", str(plan.servers))
    return actor.remote(directory, index, host, ("--http-listen", "off", *plan.flags, *place), plan.state_dir)


def _wait(plan: ClusterPlan, directory: Any, end: float) -> None:
    """Waits until all servers run."""
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
            raise ClusterError(f"servers that do not serve within {plan.timeout:g} s: {numbers}")
        pause.wait(_LOOK_SECONDS)
