"""Keeps a server running, whatever ends it. Knows nothing of Ray."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gradserve.address import Address
from gradserve_server.accumulators.round_hold import HeldRounds
from gradserve_server.on_ray.directory import MemberRecord, MemberState
from gradserve_server.on_ray.server_process import ServerProcess
from gradserve_server.storage.directory import StateError

REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
_PORT_PATIENCE_SECONDS = 5.0


class DirectoryClient(Protocol):
    """The directory, as those who supervise servers see it."""

    def begin(self, index: int, node: str, epoch: int = 0, size: int = 0) -> MemberRecord:
        """Notes that a server is about to start, and what is known of the cluster's size; returns its record."""

    def report(self, record: MemberRecord) -> None:
        """Notes what has become of it. Does not wait."""


@dataclass(frozen=True)
class Place:
    """Where a server is, and how it starts.

    Attributes:
        index: The number of the server.
        node: The IP address of the node, on which it listens.
        flags: Flags of `gradserve serve`, but for the size of the cluster, which the directory knows.
        prepare: Called with that size before each start of the server; ends what an interrupted change of it has left.
        decided: Returns how often the cluster has changed its size, and the number of servers since then, as far as
            that is on disk here.
    """

    index: int
    node: str
    flags: Sequence[str]
    prepare: Callable[[int], object] = lambda _size: None
    decided: Callable[[], tuple[int, int]] = lambda: (0, 0)


class Supervisor:
    """Starts a server again whenever it ends, at the same port, with pauses that grow while it does not come up.

    The server is started again here, and not with the actor: Ray would start the actor on the same node, where its
    placement is, and without a pause between attempts. Ray is for what ends the actor or the node.
    """

    def __init__(self, directory: DirectoryClient, place: Place) -> None:
        """Takes the directory to report to; starts nothing yet."""
        self._directory = directory
        self._place = place
        self._stopping = threading.Event()
        self._server: ServerProcess | None = None

    def run(self) -> None:
        """Keeps the server running until `stop`, and returns when it has ended.

        The calling thread must live as long: the server ends with it.
        """
        pause = _FIRST_PAUSE_SECONDS
        record = MemberRecord(self._place.index)
        while not self._stopping.is_set():
            has_served = False
            try:
                epoch, size = max((record.epoch, record.size), self._place.decided())
                record = self._directory.begin(self._place.index, self._place.node, epoch, size)
                if record.index >= record.size:
                    self._stopping.wait(_WAIT_SECONDS)  # The cluster does not have this server yet.
                    continue
                self._place.prepare(record.size)
                flags = ("--cluster-size", str(record.size)) if "--cluster" in self._place.flags else ()
                with ServerProcess((*self._place.flags, *flags, "--listen", self._listen(record.address))) as server:
                    self._server = server
                    record, has_served = self._attend(server, replace(record, pid=server.pid))
            except (StateError, OSError) as error:
                record = replace(record, problem=str(error))
            self._server = None
            pause = _FIRST_PAUSE_SECONDS if has_served else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._directory.report(record)
            self._stopping.wait(pause)
        self._directory.report(replace(record, state=MemberState.STOPPED, pid=0))

    def stop(self) -> None:
        """Asks the server to end in order, and `run` to return. Does not wait."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        """True from `stop` on."""
        return self._stopping.is_set()

    def hold_rounds(self) -> HeldRounds | None:
        """Asks the server to hold rounds; returns which are open, None until it serves and says so."""
        server = self._server
        return server.hold_rounds() if server is not None and server.address else None

    def release_rounds(self) -> None:
        """Lets rounds begin again."""
        if (server := self._server) is not None and server.address:
            server.release_rounds()

    def _attend(self, server: ServerProcess, record: MemberRecord) -> tuple[MemberRecord, bool]:
        """Reports until the server has ended; returns its last record, and whether it has served."""
        has_served = server.wait_until_serving()
        if has_served:
            record = replace(record, address=server.address, state=MemberState.RUNNING, problem="")
            self._report_until_end(server, record)
        problem = "" if self._stopping.is_set() else server.last_words
        return replace(record, state=MemberState.RESTARTING, pid=0, problem=problem), has_served

    def _report_until_end(self, server: ServerProcess, record: MemberRecord) -> None:
        is_asked = False
        reported = -REPORT_SECONDS
        while not server.has_ended(within=_LOOK_SECONDS):
            if self._stopping.is_set() and not is_asked:
                server.terminate()
                is_asked = True
            if time.monotonic() - reported >= REPORT_SECONDS:
                self._directory.report(record)
                reported = time.monotonic()

    def _listen(self, before: str) -> str:
        """Returns the address to listen on: at the port that clients know, unless something else has taken it."""
        port = Address.to_connect(before).port if before else 0
        end = time.monotonic() + _PORT_PATIENCE_SECONDS
        while port and not _is_free(self._place.node, port):
            if time.monotonic() > end or self._stopping.wait(0.1):
                port = 0
        return str(Address(self._place.node, port))


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True
