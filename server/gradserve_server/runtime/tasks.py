"""Coroutines that run at once until they first wait, and tasks that outlive their callers.

Most calls never wait. A task for each of them, and a turn of the event loop until it begins, would take longer than
their work. Python has eager tasks for this, but only from 3.12 on.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from types import coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EagerCall(Generic[T]):
    """A call that has run until its end, or until it first had to wait.

    The first part runs in the caller's task. If `rest` runs in another one, the first part must not have entered
    anything that belongs to its task, such as `asyncio.timeout`.

    Attributes:
        is_done: Whether it has ended.
    """

    __slots__ = ("_error", "_result", "_waits_for", "_work", "is_done")

    def __init__(self, work: Awaitable[T]) -> None:
        """Runs the first part."""
        self._work: Generator[Any, Any, T] = work.__await__()
        self._waits_for: Any = None
        self._result: Any = None
        self._error: Exception | None = None
        self.is_done = True
        try:
            self._waits_for = self._work.send(None)
            self.is_done = False
        except StopIteration as end:
            self._result = end.value
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Returns the result of a call that has ended, or raises its error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the work's memory until it is collected
        result: T = self._result
        return result

    async def rest(self) -> T:
        """Runs the rest; returns the result or raises the error. Await it once, if the call has not ended."""
        return await self._resume()

    @coroutine
    def _resume(self) -> Generator[Any, Any, T]:
        waits_for, self._waits_for = self._waits_for, None
        while True:
            try:
                answer = yield waits_for
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as error:
                resume: Any = self._work.throw
                answer = error
            else:
                resume = self._work.send
            try:
                waits_for = resume(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                del answer  # as above


class BackgroundTasks:
    """Work that continues when its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Does some work eagerly; makes a task only if it has to wait."""
        begun = EagerCall(work)
        return begun.result() if begun.is_done else await asyncio.shield(self.begin(begun.rest()))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts some work in a task, which nobody has to await."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)
        return task


def retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieves an exception that nobody may be waiting for."""
    if not done.cancelled():
        done.exception()
