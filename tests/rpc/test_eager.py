"""Coroutines that run at once."""

import asyncio
import contextlib

import pytest

from gradserve_server.runtime.event_loop import EagerCall


class World:
    """Something to wait for, and a list of what happened."""

    def __init__(self) -> None:
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.happened: list[str] = []

    async def work(self) -> int:
        self.happened.append("begun")
        try:
            result = await self.future
        except asyncio.CancelledError:
            self.happened.append("cancelled")
            raise
        finally:
            self.happened.append("ended")
        await asyncio.sleep(0)
        return result


@pytest.fixture
async def world() -> World:
    return World()


async def test_work_that_never_waits_is_done() -> None:
    async def work() -> int:
        return 3

    begun = EagerCall(work())
    assert begun.is_done
    assert begun.result() == 3


async def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    async def work() -> int:
        raise ValueError("no")

    begun = EagerCall(work())
    assert begun.is_done
    with pytest.raises(ValueError, match="no"):
        begun.result()


async def test_the_rest_in_a_task(world: World) -> None:
    begun = EagerCall(world.work())
    assert not begun.is_done
    assert world.happened == ["begun"]
    task = asyncio.create_task(begun.rest())
    world.future.set_result(5)
    assert await task == 5


async def test_the_rest_here(world: World) -> None:
    begun = EagerCall(world.work())
    world.future.set_result(5)
    assert await begun.rest() == 5


async def test_an_error_of_the_rest(world: World) -> None:
    begun = EagerCall(world.work())
    world.future.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await begun.rest()
    assert world.happened == ["begun", "ended"]


async def test_a_cancelled_task_cancels_what_is_waited_for(world: World) -> None:
    task = asyncio.create_task(EagerCall(world.work()).rest())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.future.cancelled()
    assert world.happened == ["begun", "cancelled", "ended"]


async def test_work_may_survive_a_cancellation(world: World) -> None:
    async def work() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await world.future
        await asyncio.sleep(0)
        return "survived"

    task = asyncio.create_task(EagerCall(work()).rest())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "survived"


async def test_a_closed_rest_closes_the_work(world: World) -> None:
    rest = EagerCall(world.work()).rest()
    rest.send(None)
    rest.close()
    assert world.happened == ["begun", "ended"]


async def test_time_limits_around_the_rest(world: World) -> None:
    begun = EagerCall(world.work())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await begun.rest()
    assert world.happened == ["begun", "cancelled", "ended"]
