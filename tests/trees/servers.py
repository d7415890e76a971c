"""A server, and aggregators that pass gradients on to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradserve_server.config import ServerConfig
from gradserve_server.configuration.servers import UpstreamConfig
from gradserve_server.testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP


def aggregator(upstream: str, workers: int, grace: float = 30.0, **settings: Any) -> LocalServer:
    """Returns an aggregator that is not running yet. Its grace is so long that tests notice whoever waits for it."""
    config = UpstreamConfig(upstream=upstream, upstream_workers=workers, upstream_grace_seconds=grace)
    return LocalServer(ServerConfig(runtime=NOT_WARMED_UP, upstream=config, **settings))


@contextmanager
def running_tree(workers: int, grace: float = 30.0) -> Iterator[tuple[LocalServer, LocalServer]]:
    """Runs a server and one aggregator in this process, until the end of the block."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top, aggregator(top.address, workers, grace) as near:
        yield top, near
