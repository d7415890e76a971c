"""Looks at clusters."""

import ray

from gradserve_server.on_ray.directory import Heard
from gradserve_server.on_ray.handles import REPLY_SECONDS, directory_of
from gradserve_server.on_ray.seen_member import SeenMember
from gradserve_server.on_ray.supervision import REPORT_SECONDS

_SILENT_AFTER_SECONDS = 3 * REPORT_SECONDS


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
