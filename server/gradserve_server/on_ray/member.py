"""The actor of a server."""

import threading
from pathlib import Path
from typing import Any

import ray

from gradserve_server.on_ray.directory import MemberRecord
from gradserve_server.on_ray.supervision import Place, Supervisor


class Member:
    """Keeps one server of a cluster running, as long as the actor lives."""

    def __init__(
        self, directory: Any, index: int, host: str | None, flags: tuple[str, ...], state_dir: Path | None
    ) -> None:
        """Starts the server, and does not wait for it.

        Args:
            directory: The handle of the directory's actor.
            index: The number of the server.
            host: The address to listen on; None for that of the node.
            flags: Flags of `gradserve serve`.
            state_dir: The folder of the state directories of all servers; None for servers that are not durable.
        """
        state = () if state_dir is None else ("--state-dir", str(state_dir / str(index)))
        place = Place(index, host or ray.util.get_node_ip_address(), (*flags, *state))
        self._supervisor = Supervisor(_RemoteDirectory(directory), place)
        self._thread = threading.Thread(target=self._supervisor.run, name="gradserve-supervisor", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the server in order; False if it has not ended within `timeout` seconds."""
        self._supervisor.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()


class _RemoteDirectory:
    """The directory, in its actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def begin(self, index: int, node: str) -> MemberRecord:
        record: MemberRecord = ray.get(self._handle.begin.remote(index, node))
        return record

    def report(self, record: MemberRecord) -> None:
        self._handle.report.remote(record)
