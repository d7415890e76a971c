"""A server that grows older when it is told, and programs that are its clients."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.listeners.grpc.listener import ClientKeepalive, GrpcListener
from gradserve_server.runtime.event_loop import Turn
from gradserve_testing import LocalServer
from tests.servers.clocks import SkippingClock
from tests.servers.processes import ended
from tests.servers.runtime import NOT_WARMED_UP

CLIENT_LEASE = 60.0
PATIENT = ClientKeepalive()


class AgingServer(LocalServer):
    """A server whose clock can be put forward."""

    def __init__(self, config: ServerConfig | None = None, keepalive: ClientKeepalive = PATIENT) -> None:
        self.clock = SkippingClock()
        listener = partial(GrpcListener, keepalive=keepalive)
        super().__init__(config, Parts(clock=self.clock, make_listener=listener))


@contextmanager
def aging_cluster(size: int) -> Iterator[Sequence[AgingServer]]:
    """Runs the servers of a cluster in this process, until the end of the block."""
    places = [ClusterConfig(cluster="train", cluster_size=size, cluster_index=index) for index in range(size)]
    with ExitStack() as stack:
        yield [stack.enter_context(AgingServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=each))) for each in places]


def num_private(server: LocalServer) -> int:
    """Accumulators and layers: all those of these tests are private."""
    return server.inspect(lambda server: server.registry.factory.count.used + server.layers.count.used)


def num_held(server: LocalServer) -> int:
    """Leases that clients hold."""

    def look(server: Server) -> int:
        clients = server.lifetimes.clients._clients.values()
        return sum(each.holder is not None and not each.holder.done() for each in clients)

    return server.inspect(look)


def pass_time(server: AgingServer, seconds: float) -> None:
    """Lets the server's leases grow older."""

    def skip(running: Server) -> None:
        server.clock.skipped += seconds
        running.lifetimes.expire(Turn(10_000))

    server.inspect(skip)


@contextmanager
def program(address: str, then: str) -> Iterator["subprocess.Popen[str]"]:
    """A program with a client that it never closes, once that has made one of everything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.resources.program", address, then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    with ended(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        yield process
