"""Coroutines that run at the same time."""

import asyncio
from collections.abc import Coroutine, Iterable


async def all_of(coroutines: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs coroutines at the same time until all have ended. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
