"""Whose turn it is to create parameters that many clients would create, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gradserve_server.errors import DeadlineExceededError, UnavailableError
from gradserve_server.parameters.queue import Creators
from gradserve_server.resources.registry import ResourceKey
from tests.simulation.clock import VirtualLoop

KEY = ResourceKey("test", "p")
MIB = 1 << 20


class Bench:
    """Clients that ask for the turn.

    Attributes:
        creators: What they ask.
        exists: Whether the parameters exist.
        had: The clients that were answered, in order, with the time.
    """

    def __init__(self) -> None:
        self.creators = Creators()
        self.exists = False
        self.had: list[tuple[str, float]] = []

    async def ask(self, creator: str, *, num_bytes: int = 0, timeout: float | None = None) -> None:
        await self.creators.turn(KEY, creator, num_bytes, lambda: self.exists, timeout)
        self.had.append((creator, round(asyncio.get_running_loop().time(), 3)))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.had]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_virtual_time(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(0.0)) as runner:
            runner.run(test(Bench()))

    return run


async def _one_at_a_time(bench: Bench) -> None:
    waits = [asyncio.ensure_future(bench.ask(name)) for name in "abc"]
    await settled()
    assert bench.names == ["a"]
    bench.creators.end(KEY, "a")  # it has failed
    await settled()
    assert bench.names == ["a", "b"]
    bench.exists = True  # b has created them
    bench.creators.end(KEY)
    await asyncio.gather(*waits)
    assert bench.names == ["a", "b", "c"]


async def _found_at_once(bench: Bench) -> None:
    bench.exists = True
    await asyncio.gather(*[bench.ask(name) for name in "abc"])
    assert bench.had == [("a", 0.0), ("b", 0.0), ("c", 0.0)]


async def _after_a_death(bench: Bench) -> None:
    """100 MiB take 5.24 s at 20 MB/s."""
    await asyncio.gather(*[bench.ask(name, num_bytes=100 * MIB) for name in "abc"])
    assert bench.had == [("a", 0.0), ("b", 15.243), ("c", 30.486)]


async def _asked_again(bench: Bench) -> None:
    """The answer was lost: it has the turn as before."""
    await bench.ask("a")
    await bench.ask("a")
    assert bench.had == [("a", 0.0), ("a", 0.0)]


async def _others_do_not_end_it(bench: Bench) -> None:
    await bench.ask("a")
    bench.creators.end(KEY, "b")
    with pytest.raises(
        DeadlineExceededError, match="another client was about to create parameters 'test/p'.*within 3 s"
    ):
        await bench.ask("c", timeout=3.0)


async def _server_shuts_down(bench: Bench) -> None:
    await bench.ask("a")
    waiting = asyncio.ensure_future(bench.ask("b"))
    await settled()
    bench.creators.close(UnavailableError("the server is shutting down"))
    with pytest.raises(UnavailableError):
        await waiting


async def _many_names(bench: Bench) -> None:
    """Turns take memory, whoever asks for names that will never exist."""
    keys = [ResourceKey("test", str(number)) for number in range(3000)]
    for key in keys:
        await bench.creators.turn(key, "a", 0, lambda: False, None)
    assert len(bench.creators) == 1024
    await bench.creators.turn(keys[-1], "b", 0, lambda: False, 0.0)  # as if there were no turns
    await asyncio.sleep(10)
    await bench.creators.turn(keys[-1], "c", 0, lambda: False, 0.0)
    assert len(bench.creators) == 1


test_one_client_has_the_turn_until_it_has_created_or_failed = in_virtual_time(_one_at_a_time)
test_nobody_waits_for_parameters_that_exist = in_virtual_time(_found_at_once)
test_another_has_the_turn_when_a_creator_is_silent = in_virtual_time(_after_a_death)
test_a_client_that_asks_again_still_has_the_turn = in_virtual_time(_asked_again)
test_nobody_ends_the_turn_of_another = in_virtual_time(_others_do_not_end_it)
test_a_server_that_shuts_down_ends_waits = in_virtual_time(_server_shuts_down)
test_turns_are_bounded = in_virtual_time(_many_names)
