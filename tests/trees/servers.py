"""A server, and aggregators that pass gradients on to it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gradserve.testing import ServerProcess
from gradserve_server.app import Server
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.config.servers import UpstreamConfig
from gradserve_testing import LocalServer
from gradserve_testing.server_process import free_port
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import all_sharded
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP


def aggregator(upstream: str, workers: int, grace: float = 30.0, **settings: Any) -> LocalServer:
    """Returns an aggregator that is not running yet. Its grace is so long that tests notice whoever waits for it."""
    config = UpstreamConfig(upstream=upstream, upstream_workers=workers, upstream_grace_seconds=grace)
    return LocalServer(ServerConfig(runtime=NOT_WARMED_UP, upstream=config, **settings))


class RestartingAggregator:
    """An aggregator of two workers that ends at once, whatever is under way, and is started again."""

    def __init__(self, upstream: str) -> None:
        config = UpstreamConfig(upstream=upstream, upstream_workers=2, upstream_grace_seconds=1.0)
        self._config = ServerConfig(runtime=RuntimeConfig(warm_up=False, drain_seconds=0.01), upstream=config)
        self.run = LocalServer(self._config, address=f"127.0.0.1:{free_port()}")

    def restart(self) -> None:
        address = self.run.address
        self.run.__exit__()
        self.run = LocalServer(self._config, address=address)
        self.run.__enter__()


@contextmanager
def running_tree(workers: int, grace: float = 30.0) -> Iterator[tuple[LocalServer, LocalServer]]:
    """Runs a server and one aggregator in this process, until the end of the block."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top, aggregator(top.address, workers, grace) as near:
        yield top, near


@contextmanager
def running_tree_on(num_servers: int, workers: int, grace: float = 30.0) -> Iterator[tuple[list[str], LocalServer]]:
    """Runs servers and one aggregator in this process, until the end of the block; yields the servers' addresses, too.

    On several servers, whatever can be sharded is, however small it is.
    """
    with ExitStack() as stack:
        if num_servers == 1:
            servers = [stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP)))]
        else:
            stack.enter_context(all_sharded())
            servers = stack.enter_context(running_cluster(num_servers))
        addresses = addresses_of(servers)
        yield addresses, stack.enter_context(aggregator(",".join(addresses), workers, grace))


@contextmanager
def aggregator_process(folder: Path, top: str, *flags: str) -> Iterator[ServerProcess]:
    """Runs an aggregator of two workers in a process of its own, until the end of the block; its grace never ends."""
    settings = ["--upstream", top, "--upstream-workers", "2", "--upstream-grace-seconds", "600", "--warm-up", "false"]
    with ServerProcess(folder, *settings, *flags) as process:
        yield process


def end_grace(near: LocalServer, num_waiting: int) -> None:
    """Passes on the gradients that wait at an aggregator for others, as the end of the grace does, once so many do."""

    def flush(server: Server) -> bool:
        assert server.aggregator is not None
        known = (*server.aggregator.accumulators.known, *server.aggregator.parameters.known)
        waiting = [each.batches for each in known]
        if sum(each.num_waiting for each in waiting) < num_waiting:
            return False
        for batches in waiting:
            for batch in list(batches._batches.values()):
                batches._flush_late(batch)
        return True

    eventually(lambda: near.inspect(flush))
