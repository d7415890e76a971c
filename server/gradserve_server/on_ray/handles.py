"""Finds the actors of clusters."""

from typing import Any

import ray
from ray.util import list_named_actors

from gradserve.discovery.ray import NAMESPACE, directory_name
from gradserve_server.on_ray.directory import LocalRay
from gradserve_server.on_ray.errors import ClusterError

REPLY_SECONDS = 30.0


def member_name(cluster: str, index: int) -> str:
    """Returns the name of the actor of a server, which is also in its directory's placement group."""
    return f"{directory_name(cluster)}:{index}"


def find_actor(name: str) -> Any | None:
    """Returns the handle of an actor, None if there is none of this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def directory_of(cluster: str) -> Any:
    """Returns the handle of a cluster's directory.

    Raises:
        ClusterError: There is no cluster of this name.
    """
    directory = find_actor(directory_name(cluster))
    if directory is None:
        there_are = f"there are {', '.join(names)}" if (names := clusters()) else "there is none"
        raise ClusterError(f"no cluster {cluster!r} on this Ray; {there_are}")
    return directory


def clusters() -> list[str]:
    """Returns the names of the clusters on this Ray."""
    prefix = directory_name("")
    found = [name.removeprefix(prefix) for name in list_named_actors() if name.startswith(prefix)]
    return sorted(name for name in found if ":" not in name)


def member_indexes(cluster: str) -> list[int]:
    """Returns the numbers of the servers of a cluster that have actors, also of those that are no part of it yet."""
    prefix = member_name(cluster, 0).removesuffix("0")
    found = [name.removeprefix(prefix) for name in list_named_actors() if name.startswith(prefix)]
    return sorted(int(each) for each in found if each.isdecimal())


def only_cluster() -> str:
    """Returns the name of the only cluster on this Ray.

    Raises:
        ClusterError: There is none, or there are several.
    """
    names = clusters()
    if len(names) != 1:
        raise ClusterError(f"say which cluster: there are {', '.join(names)}" if names else "no cluster on this Ray")
    return names[0]


def inherited_local_ray() -> LocalRay | None:
    """Returns the process of this Ray if another cluster has started it."""
    for name in clusters():
        directory = find_actor(directory_name(name))
        local: LocalRay | None = ray.get(directory.local_ray.remote(), timeout=REPLY_SECONDS) if directory else None
        if local:
            return local
    return None
