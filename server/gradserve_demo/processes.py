"""The processes of the demo, seen from the coordinator: its server and its workers."""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self, TypeAlias, cast

from gradserve_demo import worker
from gradserve_demo.options import DemoError
from gradserve_demo.worker import Failed, Finished, Message, WorkerTask

_POLL_SECONDS = 0.05
_LOG_TAIL = 2000


class ServerProcess:
    """Runs a server on a free port of this machine while the context lasts.

    Leaving the context asks the server to shut down, and raises `DemoError` if it does not shut down cleanly. Starting
    and stopping may each take `timeout` seconds.

    Attributes:
        address: The address it listens on; set inside the context.
    """

    def __init__(self, timeout: float) -> None:
        self.address = ""
        self._timeout = timeout
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = Path(
                resources.enter_context(
                    tempfile.TemporaryDirectory(prefix="gradserve-demo-", ignore_cleanup_errors=True)
                )
            )
            address_file = folder / "address"
            self._log = folder / "server.log"
            # A file, not a pipe: nobody reads it while the server runs, and a full pipe would block the server.
            log = resources.enter_context(self._log.open("wb"))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "gradserve_server", "serve"),
                    *("--listen", "127.0.0.1:0"),
                    *("--address-file", str(address_file)),
                    # Most runs call no ops, and compiling kernels would take processor time from the workers.
                    *("--warm-up", "false"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C should reach only the demo, which then ends the server.
                process_group=0,
            )
            # Runs first on exit: the files must outlive the process.
            resources.callback(self._kill)
            self.address = self._wait_for_address(address_file)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        with self._resources:
            self._process.terminate()
            try:
                code = self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                problem = f"did not shut down within {self._timeout:g} seconds"
            else:
                if code == 0:
                    return
                problem = f"ended with exit code {code}"
            # An error inside the context is kept as this one's context: it may be a consequence of it.
            if error is None or isinstance(error, Exception):
                raise self._error(problem)

    def _wait_for_address(self, address_file: Path) -> str:
        """Returns the address once the server has written it."""
        deadline = time.monotonic() + self._timeout
        while True:
            lines = address_file.read_text().split("\n") if address_file.exists() else []
            if len(lines) > 1:  # The line is complete.
                return lines[0]
            if time.monotonic() > deadline:
                raise self._error(f"did not start within {self._timeout:g} seconds")
            try:
                code = self._process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise self._error(f"ended with exit code {code} before it served")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _error(self, problem: str) -> DemoError:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        return DemoError(f"the server {problem}" + (f"; its last words:\n{tail}" if tail else ""))


CoordinatorConnection: TypeAlias = "Connection[None, Message]"

# A worker whose own wait times out reports that with more detail; give it time to do so first.
_GRACE_SECONDS = 10.0


class WorkerPool:
    """Spawned processes, one for each task, that live as long as the context.

    Every wait here is bounded, a little more loosely than the workers' own, which end after `timeout` seconds. A worker
    that fails, dies or falls silent raises `DemoError`.
    """

    def __init__(self, tasks: Sequence[WorkerTask], timeout: float) -> None:
        self._tasks = tasks
        self._timeout = timeout + _GRACE_SECONDS
        self._processes: dict[int, SpawnProcess] = {}
        self._connections: dict[int, CoordinatorConnection] = {}
        self._unfinished: set[int] = set()
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            for index in range(len(self._tasks)):
                resources.callback(self._end, index)
                self._spawn(index)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        with self._resources:
            if error is not None:
                return
            for process in self._processes.values():
                process.join(self._timeout)
                if process.exitcode != 0:
                    raise DemoError(f"{process.name} finished, but {_how_it_ended(process)}")

    def start(self, index: int) -> None:
        """Tells a worker that is ready to start training."""
        self._connections[index].send(None)

    def kill_and_restart(self, index: int) -> None:
        """Kills a worker, whatever it is doing, and starts it again with the same task."""
        self._end(index)
        self._spawn(index)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Yields what the workers report, with the worker's index, until all have finished.

        Blocks between messages. Raises `DemoError` if a worker fails, if its process ends early,
        or if no worker reports for too long.
        """
        while self._unfinished:
            indices = {self._connections[index]: index for index in self._unfinished}
            readable = wait(list(indices), self._timeout)
            if not readable:
                names = ", ".join(self._tasks[index].worker_id for index in sorted(self._unfinished))
                raise DemoError(f"no word from {names} for {self._timeout:g} seconds")
            for connection in cast(list[CoordinatorConnection], readable):
                index = indices[connection]
                message = self._receive(connection, index)
                if isinstance(message, Failed):
                    raise DemoError(f"{self._tasks[index].worker_id} failed: {message.error}\n{message.traceback}")
                if isinstance(message, Finished):
                    self._unfinished.remove(index)
                yield index, message

    def _spawn(self, index: int) -> None:
        # Spawned, not forked: gRPC's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        task = self._tasks[index]
        ours, theirs = context.Pipe()
        self._connections[index] = cast(CoordinatorConnection, ours)
        with theirs:  # Once started, the process has its own copy.
            process = context.Process(target=worker.main, args=(task, theirs), name=task.worker_id, daemon=True)
            process.start()
        self._processes[index] = process
        self._unfinished.add(index)

    def _end(self, index: int) -> None:
        """Kills a process if there is one, whatever it is doing, and closes the connection to it."""
        if (process := self._processes.pop(index, None)) is not None:
            process.kill()
            process.join()
            process.close()
        if (connection := self._connections.pop(index, None)) is not None:
            connection.close()

    def _receive(self, connection: CoordinatorConnection, index: int) -> Message:
        try:
            return connection.recv()
        except (EOFError, OSError):
            process = self._processes[index]
            process.join(self._timeout)
            raise DemoError(f"{process.name} was not done, but {_how_it_ended(process)}") from None


def _how_it_ended(process: SpawnProcess) -> str:
    if process.exitcode is None:
        return "its process hangs"
    return f"its process ended with exit code {process.exitcode}"
