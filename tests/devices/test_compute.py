"""Work in threads, and callers who do not wait for it."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from gradserve_server.devices.compute import INLINE_BYTES, ThreadCompute, checkpoint
from gradserve_server.errors import UnavailableError
from tests.servers.polling import PATIENCE_SECONDS, eventually


@pytest.fixture
def compute() -> Iterator[ThreadCompute]:
    made = ThreadCompute(1)
    yield made
    made.close()


class BoomError(Exception):
    """What goes wrong."""


def fail() -> None:
    raise BoomError


@pytest.mark.parametrize(("num_bytes", "in_thread"), [(0, False), (INLINE_BYTES, False), (INLINE_BYTES + 1, True)])
async def test_big_work_runs_in_a_thread(compute: ThreadCompute, num_bytes: int, in_thread: bool) -> None:
    assert (await compute.run(num_bytes, threading.get_ident) != threading.get_ident()) is in_thread
    assert await compute.run_in_thread(threading.get_ident) != threading.get_ident()


async def test_errors_reach_the_caller(compute: ThreadCompute) -> None:
    with pytest.raises(BoomError):
        await compute.run(0, fail)
    with pytest.raises(BoomError):
        await compute.run_in_thread(fail)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_waits_for_its_work(compute: ThreadCompute, fails: bool) -> None:
    started, finish, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert finish.wait(PATIENCE_SECONDS)
        ended.set()
        if fails:
            raise BoomError

    caller = asyncio.create_task(compute.run_in_thread(work))
    await asyncio.to_thread(started.wait, 30)
    for _ in range(3):  # however often
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_work_that_has_not_begun_is_not_done(compute: ThreadCompute) -> None:
    started, finish = threading.Event(), threading.Event()
    begun: list[int] = []

    def first() -> None:
        started.set()
        assert finish.wait(PATIENCE_SECONDS)

    busy = asyncio.create_task(compute.run_in_thread(first))
    await asyncio.to_thread(started.wait, 30)
    waiting = asyncio.create_task(compute.run_in_thread(begun.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    finish.set()
    await busy
    assert begun == []


class Endless:
    """Work that ends only at a checkpoint."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        try:
            while True:
                checkpoint()
        finally:
            self.ended.set()


async def test_work_of_a_cancelled_caller_ends_at_its_next_checkpoint(compute: ThreadCompute) -> None:
    work = Endless()
    caller = asyncio.create_task(compute.run_cancellable(work))
    await asyncio.to_thread(work.started.wait, PATIENCE_SECONDS)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.ended.is_set()
    assert await compute.run_cancellable(threading.get_ident) != threading.get_ident()


async def test_closing_ends_work_that_can_be_cancelled() -> None:
    compute, work = ThreadCompute(1), Endless()
    caller = asyncio.create_task(compute.run_cancellable(work))
    await asyncio.to_thread(work.started.wait, PATIENCE_SECONDS)
    compute.close()
    with pytest.raises(UnavailableError):
        await caller


class Inputs:
    """What work has in its hands."""


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
class TestMemoryOfWorkThatEndsWithAnError:
    """It is free when the caller has been told, not when the garbage collector comes by."""

    async def test_that_failed(self, compute: ThreadCompute) -> None:
        def work(_inputs: Inputs) -> None:
            fail()

        inputs = Inputs()
        gone = weakref.ref(inputs)
        with pytest.raises(BoomError):
            await compute.run_in_thread(work, inputs)
        del inputs
        await asyncio.to_thread(eventually, lambda: gone() is None)

    async def test_that_was_cancelled(self, compute: ThreadCompute) -> None:
        endless, inputs = Endless(), Inputs()
        gone = weakref.ref(inputs)

        def work(_inputs: Inputs) -> None:
            endless()

        call = asyncio.create_task(compute.run_cancellable(work, inputs))
        await asyncio.to_thread(endless.started.wait, PATIENCE_SECONDS)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        del inputs, call
        await asyncio.to_thread(eventually, lambda: gone() is None)
