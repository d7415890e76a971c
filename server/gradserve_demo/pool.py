"""The worker processes, seen from the coordinator."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self, TypeAlias, cast

from gradserve_demo import worker
from gradserve_demo.errors import DemoError
from gradserve_demo.messages import Failed, Finished, Message, WorkerTask

CoordinatorConnection: TypeAlias = "Connection[None, Message]"

# A worker whose own wait times out reports that with more detail; give it time to do so first.
_GRACE_SECONDS = 10.0


class WorkerPool:
    """Spawned processes, one for each task, that live as long as the context.

    Every wait here is bounded; a worker that fails, dies or falls silent raises `DemoError`.
    """

    def __init__(self, tasks: Sequence[WorkerTask], timeout: float) -> None:
        """Starts nothing yet.

        Args:
            tasks: One for each process.
            timeout: Seconds after which the workers' own waits end.
        """
        self._tasks = tasks
        self._timeout = timeout + _GRACE_SECONDS
        self._processes: list[SpawnProcess] = []
        self._connections: list[CoordinatorConnection] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        # Spawned, not forked: gRPC's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ExitStack() as resources:
            for task in self._tasks:
                ours, theirs = context.Pipe()
                with theirs:  # Once started, the process has its own copy.
                    self._connections.append(cast(CoordinatorConnection, resources.enter_context(ours)))
                    process = context.Process(target=worker.main, args=(task, theirs), name=task.worker_id, daemon=True)
                    process.start()
                self._processes.append(process)
                resources.callback(_end, process)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        with self._resources:
            if exc_value is not None:
                return
            for process in self._processes:
                process.join(self._timeout)
                if process.exitcode != 0:
                    raise DemoError(f"{process.name} finished, but {_how_it_ended(process)}")

    def start(self) -> None:
        """Tells all workers to start training."""
        for connection in self._connections:
            connection.send(None)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Yields what the workers report, with the worker's index, until all have finished.

        Blocks between messages. Raises `DemoError` if a worker fails, if its process ends early,
        or if no worker reports for too long.
        """
        indices = {connection: index for index, connection in enumerate(self._connections)}
        while indices:
            readable = wait(list(indices), self._timeout)
            if not readable:
                names = ", ".join(self._tasks[index].worker_id for index in indices.values())
                raise DemoError(f"no word from {names} for {self._timeout:g} seconds")
            for connection in cast(list[CoordinatorConnection], readable):
                index = indices[connection]
                message = self._receive(connection, index)
                if isinstance(message, Failed):
                    raise DemoError(f"{self._tasks[index].worker_id} failed: {message.error}\n{message.traceback}")
                if isinstance(message, Finished):
                    del indices[connection]
                yield index, message

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


def _end(process: SpawnProcess) -> None:
    """Kills a process, whatever it is doing."""
    process.kill()
    process.join()
    process.close()
