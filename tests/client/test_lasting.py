"""Work that begins again after it has failed."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from gradserve_protocol import lasting
from gradserve_protocol.lasting import Failures, keep_doing, lasting_task, lasting_thread

LOG = logging.getLogger("tests.lasting")


class Work:
    """Fails a number of times, and then ends."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_begun = 0

    def do(self) -> None:
        self.num_begun += 1
        if self.num_begun <= self.num_failures:
            raise RecursionError(f"failure {self.num_begun}")

    async def do_later(self) -> None:
        await asyncio.sleep(0)
        self.do()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "PAUSE_SECONDS", 0.0)


async def test_a_task_begins_again_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(3)
    await lasting_task("the work", work.do_later, LOG)
    assert work.num_begun == 4
    (record,) = caplog.records
    assert record.getMessage() == "the work failed and starts again"
    assert record.levelno == logging.ERROR
    assert "RecursionError: failure 1" in caplog.text


def test_a_thread_begins_again_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(3)
    thread = lasting_thread("the work", work.do, LOG, "work")
    thread.join()
    assert (work.num_begun, thread.name, thread.daemon) == (4, "work", True)
    assert len(caplog.records) == 1


async def test_a_cancelled_task_ends() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = lasting_task("the work", work, LOG)
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
async def test_what_ends_the_process_ends_the_work(end: Callable[[], BaseException]) -> None:
    async def work() -> None:
        raise end()

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        await keep_doing("the work", work, LOG)


def test_a_failure_is_logged_once_a_minute_with_the_number_of_others(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = Failures("the work", LOG, lambda: now)
    for now in range(125):
        failures.note(ValueError(str(now)))
    assert [record.getMessage() for record in caplog.records] == [
        "the work failed and starts again",
        "the work failed and starts again (59 earlier failures were left out)",
        "the work failed and starts again (59 earlier failures were left out)",
    ]


def test_threads_are_daemons_so_that_they_keep_no_process() -> None:
    assert lasting_thread("the work", threading.Event().wait, LOG, "waits").daemon  # type: ignore[arg-type]
