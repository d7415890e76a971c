"""Uses of very many tensors begin and end in turns; whatever happens between two of them, nothing is left of it."""

import asyncio
from collections.abc import Callable

import pytest

from gradserve_server.errors import NotFoundError
from gradserve_server.resources.budget import Budget
from gradserve_server.runtime.event_loop import SLICE_ITEMS
from gradserve_server.tensors.held import HeldTensors
from tests.floods.test_lists import store_of
from tests.floods.work import longest_turn

COUNT = 5 * SLICE_ITEMS + 7
HANDLES = [str(number) for number in range(COUNT)]


class Many:
    def __init__(self) -> None:
        self.budget = Budget(COUNT, "handles")
        self.store = store_of(COUNT, self.budget)

    @property
    def found(self) -> list[str]:
        return [each.handle for each in self.store.page(0, COUNT)]

    async def use(
        self, handles: list[str], *, release: bool = True, during: Callable[[HeldTensors], None] | None = None
    ) -> int:
        async with self.store.use(handles, release=release) as held:
            if during is not None:
                during(held)
            return len(held.arrays)

    def check_all_are_back(self) -> None:
        assert self.found == HANDLES
        assert self.store.delete(HANDLES) == COUNT
        assert self.budget.used == 0


@pytest.fixture
def many() -> Many:
    return Many()


async def test_a_turn_has_few_of_them(many: Many) -> None:
    used, longest = await longest_turn(many.use([*HANDLES, *HANDLES[:9]]))
    assert used == COUNT
    assert longest < 40 * SLICE_ITEMS
    assert not many.found
    assert many.budget.used == 0


async def test_without_release_they_stay(many: Many) -> None:
    assert await many.use(HANDLES, release=False) == COUNT
    many.check_all_are_back()


async def test_only_those_that_nobody_else_sees_are_exclusive(many: Many) -> None:
    seen: list[bool] = []

    def note(held: HeldTensors) -> None:
        seen.append(held.exclusive)

    async with many.store.use([HANDLES[3]]):
        await many.use(HANDLES[:600], during=note)
    await many.use(HANDLES[600:1200], during=note)
    await many.use(HANDLES[1200:1800], release=False, during=note)
    assert seen == [False, True, False]


def test_an_unknown_one_at_the_end(many: Many) -> None:
    with pytest.raises(NotFoundError, match="nowhere") as raised:
        asyncio.run(many.use([*HANDLES, "nowhere"]))
    assert raised.value.field == f"handles[{COUNT}]"
    many.check_all_are_back()


def fail(_held: HeldTensors) -> None:
    raise ZeroDivisionError


def test_an_error_during_the_use(many: Many) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(many.use(HANDLES, during=fail))
    many.check_all_are_back()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_that_is_deleted_before_its_turn(many: Many) -> None:
    using = asyncio.create_task(many.use(HANDLES))
    await turns(2)
    assert many.store.delete(HANDLES[-1:]) == 1
    with pytest.raises(NotFoundError):
        await using
    assert many.found == HANDLES[:-1]


@pytest.mark.parametrize("after", [1, 3])
async def test_cancelled_while_it_begins(many: Many, after: int) -> None:
    using = asyncio.create_task(many.use(HANDLES))
    await turns(after + 1)
    assert 0 < len(many.found) < COUNT
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    many.check_all_are_back()


@pytest.mark.parametrize("release", [True, False])
async def test_cancelled_while_it_ends(many: Many, *, release: bool) -> None:
    used: list[HeldTensors] = []
    using = asyncio.create_task(many.use(HANDLES, release=release, during=used.append))
    while not used:
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    if release:
        assert not many.found
        assert many.budget.used == 0
    else:
        many.check_all_are_back()
