"""Keeps a server running, whatever ends it. Knows nothing of Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from gradserve_protocol.address import Address
from gradserve_ray.directory import MemberRecord, MemberState
from gradserve_server.accumulators.round_hold import HeldRounds
from gradserve_server.storage.directory import StateError

REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
_PORT_PATIENCE_SECONDS = 5.0
_LAST_LINES = 20
_POLL_SECONDS = 0.05


class Supervisor:
    """Starts a server again whenever it ends, at the same port, with pauses that grow while it does not come up.

    The server is started again here, and not with the actor: Ray would start the actor on the same node, where its
    placement is, and without a pause between attempts. Ray is for what ends the actor or the node.
    """

    def __init__(self, directory: DirectoryClient, place: Place) -> None:
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


@dataclass(frozen=True)
class Place:
    """The node of a server, and the way to start the server there.

    Attributes:
        index: The number of the server.
        node: The IP address of the node, on which it listens.
        flags: Flags of `gradserve serve`, but for the size of the cluster, which the directory knows.
        prepare: Called with that size before each start of the server; ends what an interrupted change of it has left.
        decided: Returns the epoch of the cluster's size and its number of servers, from the disk of this node.
    """

    index: int
    node: str
    flags: Sequence[str]
    prepare: Callable[[int], object] = lambda _size: None
    decided: Callable[[], tuple[int, int]] = lambda: (0, 0)


class DirectoryClient(Protocol):
    """The directory's interface for supervisors of servers."""

    def begin(self, index: int, node: str, epoch: int = 0, size: int = 0) -> MemberRecord:
        """Notes that a server is about to start, and what is known of the cluster's size; returns its record."""

    def report(self, record: MemberRecord) -> None:
        """Notes what has become of it. Does not wait."""


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True


class ServerProcess:
    """Runs `gradserve serve` until the end of the block, and ends with the thread that has started it.

    What it writes goes to the standard error of this process, which Ray keeps with the logs of the actor.

    Attributes:
        address: Where it serves; empty before `wait_until_serving`.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.address = ""
        self._flags = flags
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = resources.enter_context(
                tempfile.TemporaryDirectory(prefix="gradserve-", ignore_cleanup_errors=True)
            )
            self._address_file = Path(folder) / "addresses"
            self._rounds_file = Path(folder) / "rounds"
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "gradserve_ray.bound_process", str(os.getpid())),
                    *self._flags,
                    *("--address-file", str(self._address_file)),
                    *("--rounds-file", str(self._rounds_file)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._reader = threading.Thread(target=self._read, name="gradserve-server-log", daemon=True)
            self._reader.start()
            resources.callback(self._kill)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """Its exit status, with the last lines that it has written."""
        self._reader.join(1.0)  # A process of its own, such as a debugger, may still have the pipe.
        lines = "\n".join(self._last)
        return f"exit status {self._process.returncode}" + (f"; its last words:\n{lines}" if lines else "")

    def wait_until_serving(self) -> bool:
        """Waits until it serves; False if it has ended before."""
        while not self.has_ended(within=_POLL_SECONDS):
            lines = self._address_file.read_text().split("\n") if self._address_file.exists() else []
            if len(lines) > 1:  # The line is complete.
                self.address = lines[0]
                return True
        return False

    def has_ended(self, *, within: float) -> bool:
        """True if it has ended, or ends within a number of seconds."""
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Asks it to end in order."""
        self._process.terminate()

    def hold_rounds(self) -> HeldRounds | None:
        """Asks it to hold rounds, unless it does; returns which are open, None until it says so."""
        found = HeldRounds.read(self._rounds_file)
        if found is None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
        return found

    def release_rounds(self) -> None:
        """Asks it to let rounds begin again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR2)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
