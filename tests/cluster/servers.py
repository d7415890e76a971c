"""Servers of a cluster, and names that belong to each of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gradserve_protocol.placement import home_of
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_testing import LocalServer
from gradserve_testing.server_process import ServerProcess
from tests.servers.runtime import NOT_WARMED_UP


@contextmanager
def running_cluster(size: int, name: str = "train") -> Iterator[list[LocalServer]]:
    """Runs the servers of a cluster in this process, until the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(member(name, index, size)) for index in range(size)]


def member(name: str | None, index: int, size: int) -> LocalServer:
    """Returns a server of a cluster, which is not running yet."""
    place = ClusterConfig(cluster=name, cluster_size=size, cluster_index=index)
    return LocalServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=place))


class KilledServer:
    """A member of a cluster in a process of its own, which ends with SIGKILL."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    @property
    def address(self) -> str:
        return self._process.address

    def stop(self) -> None:
        """Kills the process."""
        self._process.kill()

    def start(self) -> None:
        """Begins another one, after `stop`."""
        self._process.restart()


@contextmanager
def running_processes(folder: Path, size: int, name: str = "train") -> Iterator[list[KilledServer]]:
    """Runs the servers of a cluster in processes, on state directories in a folder, until the end of the block."""
    with ExitStack() as stack:
        found = []
        for index in range(size):
            place = folder / str(index)
            place.mkdir()
            where = f"--cluster {name} --cluster-index {index} --cluster-size {size}"
            process = ServerProcess(place, "--state-dir", str(place / "state"), "--warm-up", "false", *where.split())
            found.append(KilledServer(stack.enter_context(process)))
        yield found


def addresses_of(servers: Sequence[LocalServer]) -> list[str]:
    """Returns the addresses of servers, in their order."""
    return [each.address for each in servers]


def name_at(home: int, size: int, prefix: str = "net") -> str:
    """Returns a name in the default container that belongs to a server."""
    return next(name for number in range(1000) if home_of("", name := f"{prefix}{number}", size) == home)
