"""Looks at clusters."""

from dataclasses import dataclass

import ray

from gradserve_server.on_ray.directory import Heard
from gradserve_server.on_ray.handles import REPLY_SECONDS, directory_of
from gradserve_server.on_ray.supervision import REPORT_SECONDS

_SILENT_AFTER_SECONDS = 3 * REPORT_SECONDS


@dataclass(frozen=True)
class SeenMember:
    """A server as its cluster sees it.

    Attributes:
        index: Its number.
        address: Where it serves, or last served; empty if it never has.
        node: The IP address of its node.
        pid: The number of its process on the node; 0 if it has none.
        state: "starting", "running", "restarting", "stopped"; "silent" if nothing was heard of its actor for a while.
        restarts: How often it was started again.
        problem: How it ended, and its last words, if it has ended by itself and is not back.
    """

    index: int
    address: str
    node: str
    pid: int
    state: str
    restarts: int
    problem: str


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
