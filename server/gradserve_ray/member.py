"""The actor of a server."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from gradserve.discovery.ray import NAMESPACE, directory_name
from gradserve_protocol.lasting import lasting_thread
from gradserve_ray.directory import ClusterError, ClusterPlan, LocalRay, MemberRecord
from gradserve_ray.states.mark import DecidedSize
from gradserve_ray.states.member_state import Contents, MemberState
from gradserve_ray.supervision import Place, Supervisor
from gradserve_server.accumulators.round_hold import HeldRounds
from gradserve_server.storage.directory import StateError

REPLY_SECONDS = 30.0
_WITHOUT_STATE = {"contents": Contents({}, 0), "decide": None, "cancel": None, "settle": None}
"""The answers of a server that is not durable: nothing moves there."""
_log = logging.getLogger(__name__)


class Member:
    """Keeps one server of a cluster running, as long as the actor lives.

    While the cluster changes its size, the server does not run, and the actor gets at its state directory.
    """

    def __init__(
        self, directory: Any, index: int, host: str | None, flags: tuple[str, ...], state_dir: Path | None
    ) -> None:
        """Starts the server as soon as it is one of the cluster's, and does not wait for it.

        Args:
            directory: The handle of the directory's actor.
            index: The number of the server.
            host: The address to listen on; None for that of the node.
            flags: Flags of `gradserve serve`.
            state_dir: The folder of the state directories of all servers; None for servers that are not durable.
        """
        self._directory = _RemoteDirectory(directory)
        self._state = None
        if state_dir is not None:
            self._state = MemberState(state_dir / str(index), self._directory.first_says if index else None)
            flags = (*flags, "--state-dir", str(self._state.path))
        node = host or ray.util.get_node_ip_address()
        self._place = Place(index, node, flags, partial(self.on_state, "settle"), self._decided)
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Starts the server, unless it runs: once it has stopped, if it is about to."""
        before = self._thread
        is_alive = before is not None and before.is_alive()
        if is_alive and self._supervisor is not None and not self._supervisor.is_stopping:
            return
        supervisor = self._supervisor = Supervisor(self._directory, self._place)

        def run() -> None:
            if before is not None:
                before.join()
            supervisor.run()

        self._thread = lasting_thread("keeping the server running", run, _log, "gradserve-supervisor")

    def stop(self, timeout: float) -> bool:
        """Ends the server in order; False if it has not ended within `timeout` seconds."""
        if self._supervisor is None or self._thread is None:
            return True
        self._supervisor.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def hold_rounds(self) -> HeldRounds | None:
        return None if self._supervisor is None else self._supervisor.hold_rounds()

    def release_rounds(self) -> None:
        if self._supervisor is not None:
            self._supervisor.release_rounds()

    def on_state(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the `MemberState`, while the server does not run."""
        if self._state is None:
            return _WITHOUT_STATE[method]
        return getattr(self._state, method)(*args, **options)

    def decided_size(self) -> DecidedSize | None:
        return None if self._state is None else self._state.decided_size(self._directory.plan().id)

    def _decided(self) -> tuple[int, int]:
        found = self.decided_size() if self._place.index == 0 else None
        return (0, 0) if found is None else (found.epoch, found.servers)


class _RemoteDirectory:
    """The directory, in its actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def begin(self, index: int, node: str, epoch: int = 0, size: int = 0) -> MemberRecord:
        record: MemberRecord = ray.get(self._handle.begin.remote(index, node, epoch, size))
        return record

    def report(self, record: MemberRecord) -> None:
        self._handle.report.remote(record)

    def plan(self) -> ClusterPlan:
        plan: ClusterPlan | None = ray.get(self._handle.plan.remote())
        assert plan is not None, "`start_cluster` gives one"
        return plan

    def first_says(self, change: str) -> bool:
        """Returns whether a change of the number of servers holds, as the actor of server 0 says.

        Raises:
            StateError: It does not answer.
        """
        try:
            first = ray.get_actor(member_name(self.plan().name, 0), namespace=NAMESPACE)
            holds: bool = ray.get(first.on_state.remote("holds", change), timeout=REPLY_SECONDS)
        except (RayError, ValueError) as error:  # ValueError: there is no such actor.
            raise StateError(
                f"server 0 does not say whether a change of the number of servers was decided: {error}"
            ) from error
        return holds


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
