"""Operations that run together, in the task that awaits them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gradserve.calls.exchange import Background, Local, Operation, Pause
from gradserve.calls.retries import Attempt, Attempts
from gradserve.transport.schedule import Member, Schedule


class ConcurrentSteps:
    """Carries out steps of several operations at the same time, each in a task; the operations run in the caller's."""

    def __init__(
        self,
        perform: Callable[[Attempt | Pause | Background | Local], Awaitable[Any]],
        attempts: Callable[[Operation[Any]], Attempts[Any]],
    ) -> None:
        """Takes the function that carries out a step, and the one that adds retries to an operation."""
        self._perform = perform
        self._attempts = attempts
        self._under_way: dict[Member, asyncio.Task[Any]] = {}
        self._cancelled: list[asyncio.Task[Any]] = []

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Returns the results of operations, or raises the first error when all have ended."""
        schedule = Schedule(operations, self._attempts, self)
        try:
            while not schedule.is_over:
                await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
                for member, task in list(self._under_way.items()):
                    if task.done() and self._under_way.get(member) is task:
                        del self._under_way[member]
                        _report(schedule, member, task)
        finally:
            schedule.close()
            await asyncio.gather(*self._cancelled, return_exceptions=True)
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = asyncio.ensure_future(self._perform(step))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        task = self._under_way.pop(member)
        task.cancel()
        self._cancelled.append(task)


def _report(schedule: Schedule, member: Member, task: asyncio.Task[Any]) -> None:
    try:
        answer = task.result()
    except BaseException as error:
        schedule.fail(member, error)
    else:
        schedule.answer(member, answer)
