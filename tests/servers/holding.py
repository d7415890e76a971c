"""Servers of this process that are late: with gradients, or with everything."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_testing import LocalServer
from tests.servers.polling import eventually


class Hold:
    """Holds gradients on their way into sums while it is closed.

    Nobody can cancel that: the gradient of a call is held, too, when the call has ended for its caller.
    """

    def __init__(self, patch: pytest.MonkeyPatch, before: str = "check") -> None:
        """Holds the gradients of all servers in this process, before a step of `RoundSum`. Begins open."""
        self._is_closed = False
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        step = getattr(RoundSum, before)

        async def held(sum_: RoundSum, *args: Any, **kwargs: Any) -> Any:
            if self._is_closed:
                loop = asyncio.get_running_loop()
                turn = loop.create_future()
                self._held.append((loop, turn))
                await turn
            return await step(sum_, *args, **kwargs)

        patch.setattr(RoundSum, before, held)

    @property
    def num_held(self) -> int:
        """The gradients that it holds; others may wait for those to be added."""
        return len(self._held)

    def wait_until_held(self, count: int = 1) -> None:
        eventually(lambda: self.num_held, count.__eq__)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Holds all that come during a block."""
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False
            for loop, turn in self._held:
                loop.call_soon_threadsafe(turn.set_result, None)
            self._held.clear()


@contextmanager
def suspended(local: LocalServer) -> Iterator[None]:
    """Suspends a server during a block: it sees all that has happened at once, when it goes on."""
    is_suspended, is_over = threading.Event(), threading.Event()

    def stand_still(_: Any) -> None:
        is_suspended.set()
        is_over.wait()

    thread = threading.Thread(target=local.inspect, args=(stand_still,))
    thread.start()
    is_suspended.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
