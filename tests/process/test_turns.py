"""Work on the event loop in turns: however much it is, other tasks get theirs."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gradserve_server.runtime.event_loop import SLICE_ITEMS, InTurns, Turn, batched


async def turns_of_others(work: Callable[[], Awaitable[object]]) -> int:
    """Returns how often another task got its turn while the work was done."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    await work()
    task.cancel()
    return turns


COUNTS = [0, 1, SLICE_ITEMS, SLICE_ITEMS + 1, 5 * SLICE_ITEMS]


@pytest.mark.parametrize("count", COUNTS)
async def test_items_come_in_order_with_turns_of_others_in_between(count: int) -> None:
    found: list[int] = []

    async def work() -> None:
        found.extend([each async for each in InTurns(range(count))])

    assert await turns_of_others(work) == max(count - 1, 0) // SLICE_ITEMS
    assert found == list(range(count))


@pytest.mark.parametrize(("items", "turns"), [(1, 1), (SLICE_ITEMS // 2, 4), (SLICE_ITEMS, 9), (5 * SLICE_ITEMS, 9)])
async def test_an_item_may_be_as_much_work_as_several(items: int, turns: int) -> None:
    async def work() -> None:
        turn = Turn()
        for _ in range(10 if items > 1 else SLICE_ITEMS + 1):
            await turn.spend(items)

    assert await turns_of_others(work) == turns


@pytest.mark.parametrize("count", COUNTS)
def test_batches(count: int) -> None:
    found = list(batched(range(count)))
    assert [each for some in found for each in some] == list(range(count))
    assert len(found) == -(-count // SLICE_ITEMS)
