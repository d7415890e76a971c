"""A server that is started again on its state directory, at the same address, in the process of the test."""

from pathlib import Path
from typing import Self

from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_testing import LocalServer
from gradserve_testing.server_process import free_port
from tests.servers.runtime import NOT_WARMED_UP


class RestartingServer:
    """Runs a server until the end of the block, one run of it after the other.

    A run ends in good order, but what its state directory does not have is lost, as when it is killed.
    """

    def __init__(self, state_dir: Path | None, cluster: ClusterConfig | None = None) -> None:
        """Takes the state directory, None for none, and the server's place in a cluster."""
        self._config = ServerConfig(
            runtime=NOT_WARMED_UP,
            state=StateConfig(state_dir=None if state_dir is None else str(state_dir)),
            cluster=cluster or ClusterConfig(),
        )
        self.run = LocalServer(self._config, address=f"127.0.0.1:{free_port()}")
        """The present run."""

    @property
    def address(self) -> str:
        return self.run.address

    def stop(self) -> None:
        """Ends the present run."""
        self._address = self.run.address
        self.run.__exit__()

    def start(self) -> None:
        """Begins another run, after `stop`."""
        self.run = LocalServer(self._config, address=self._address)
        self.run.__enter__()

    def restart(self) -> None:
        """Ends the present run, and begins another one."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.run.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.run.__exit__(*exception)
