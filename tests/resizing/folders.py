"""State directories of clusters, and servers that run on them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gradserve
from gradserve_ray.states.member_state import Contents, MemberState
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of
from tests.servers.runtime import NOT_WARMED_UP


@contextmanager
def cluster(folder: Path, size: int) -> Iterator[gradserve.Client]:
    """Runs a durable cluster on the state directories of a folder, after what an interrupted change has left ended."""
    settle(folder, size, size)
    with ExitStack() as stack:
        servers = []
        for index in range(size):
            place = ClusterConfig(cluster="train", cluster_size=size, cluster_index=index)
            state = StateConfig(state_dir=str(folder / str(index)))
            servers.append(
                stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=place, state=state)))
            )
        yield stack.enter_context(gradserve.connect(addresses_of(servers)))


def states(folder: Path, count: int) -> list[MemberState]:
    """Returns the state directories of a folder."""
    first = MemberState(folder / "0")
    return [first, *[MemberState(folder / str(index), first.holds) for index in range(1, count)]]


def settle(folder: Path, size: int, count: int) -> None:
    """Ends a change in so many state directories, as before the start of a cluster of a size."""
    for each in states(folder, count):
        each.settle(size)


def contents(folder: Path, count: int) -> list[Contents]:
    """Returns what is in so many state directories."""
    return [each.contents() for each in states(folder, count)]
