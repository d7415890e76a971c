"""Operations of a client in the background go on after a fault."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradserve.calls.exchange import Operation, Pause
from gradserve.transport.aio.transport import BackgroundTask
from gradserve.transport.blocking import background
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol import lasting
from tests.servers.polling import PATIENCE_SECONDS

SETTINGS = ConnectionSettings()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.0)


def failing_twice(done: Callable[[], object]) -> Callable[[], Operation[None]]:
    """Returns what begins an operation: the first two times one that fails, before and after a step."""
    steps: Iterator[int] = iter(range(3))

    def operation() -> Operation[None]:
        number = next(steps)
        if number == 0:
            raise RecursionError("planted")
        yield Pause(0.0)
        if number == 1:
            raise MemoryError("planted")
        done()

    return operation


def nothing(*_: Any) -> Any:
    raise AssertionError("no call is made")


def test_in_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    thread = BackgroundThread(failing_twice(done.set), SETTINGS, nothing, nothing)
    assert done.wait(PATIENCE_SECONDS)
    thread.join()
    assert thread.is_done
    assert [record.getMessage() for record in caplog.records] == [
        "an operation in the background failed and starts again"
    ]


async def test_in_a_task(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()
    task = BackgroundTask(failing_twice(done.set), SETTINGS, nothing, nothing)
    await done.wait()
    await task.join()
    assert task.is_done
    assert len(caplog.records) == 1


def test_a_thread_that_is_stopped_does_not_begin_again() -> None:
    begun = threading.Event()

    def operation() -> Operation[None]:
        begun.set()
        yield Pause(1e6)

    thread = BackgroundThread(operation, SETTINGS, nothing, nothing)
    assert begun.wait(PATIENCE_SECONDS)
    thread.stop()
    thread.join()
    assert thread.is_done
