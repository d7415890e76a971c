"""Work that blocks, such as on a file, which an operation asks its transport to do."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.combinators import at_target, together
from gradserve.calls.exchange import Operation, Work
from tests.servers.connecting import no_server, transport_of


def work(run: Callable[[], Any]) -> Operation[Any]:
    return (yield Work(run))


def failing() -> None:
    raise OSError("no space left")


def test_it_runs_in_the_calling_thread() -> None:
    with no_server() as address, gradserve.connect(address) as client:
        transport = transport_of(client)
        assert transport.run(work(threading.get_ident)) == threading.get_ident()
        both = together(work(lambda: 1), at_target(0, work(lambda: 2)))
        assert transport.run(both) == [1, 2]
        with pytest.raises(OSError, match="no space left"):
            transport.run(work(failing))
        with pytest.raises(OSError, match="no space left"):
            transport.run(together(work(lambda: 1), work(failing)))


async def test_it_runs_beside_the_event_loop() -> None:
    with no_server() as address:
        async with gradserve.aio.connect(address) as client:
            transport = transport_of(client)
            is_reached = threading.Event()
            waiting = asyncio.ensure_future(transport.run(work(lambda: is_reached.wait(60))))
            await asyncio.sleep(0)
            is_reached.set()  # the loop goes on while the work waits
            assert await waiting
            assert await transport.run(work(threading.get_ident)) != threading.get_ident()
            with pytest.raises(OSError, match="no space left"):
                await transport.run(work(failing))


def test_an_operation_handles_errors_of_gradserve_only() -> None:
    def refused() -> None:
        raise gradserve.InvalidArgumentError("damaged")

    def handling(run: Callable[[], None]) -> Operation[str]:
        try:
            yield Work(run)
        except gradserve.InvalidArgumentError:
            return "handled"
        return "done"

    with no_server() as address, gradserve.connect(address) as client:
        assert transport_of(client).run(handling(refused)) == "handled"
        with pytest.raises(OSError, match="no space left"):
            transport_of(client).run(handling(failing))
