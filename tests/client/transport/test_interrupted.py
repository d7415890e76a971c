"""Calls over gRPC that are interrupted leave nothing behind: asyncio's cancellation, exceptions of signal handlers."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.transport.aio.transport import AsyncServer
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.config import ServerConfig
from gradserve_server.rpc.tensors.service import TensorServicer
from gradserve_server.tensors.store import TensorStore
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

ONES = np.ones(1_500_000, np.float32)
"""Too much for a message."""
LONG = np.ones(20_000_000, np.float32)
"""More than gRPC takes before the server reads it."""


class Stop:
    """Stops calls at a point in the server, which runs in this process, or in the client."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.num_there = 0
        self._may_go_on = threading.Event()

    async def here(self) -> None:
        self.num_there += 1
        self.reached.set()
        try:
            while not self._may_go_on.is_set():
                await asyncio.sleep(0.001)
        finally:
            self.num_there -= 1

    def go_on(self) -> None:
        self._may_go_on.set()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server.address


def after_the_upload_is_stored(patch: pytest.MonkeyPatch, stop: Stop) -> None:
    async def store(self: Any, *upload: Any) -> Any:
        handles = await real(self, *upload)
        await stop.here()
        return handles

    real = TensorStore.store
    patch.setattr(TensorStore, "store", store)


def while_the_gradient_is_added(patch: pytest.MonkeyPatch, stop: Stop) -> None:
    async def check(self: Any, *args: Any, **kwargs: Any) -> Any:
        await stop.here()
        return await real(self, *args, **kwargs)

    real = RoundSum.check
    patch.setattr(RoundSum, "check", check)


def before_the_download(patch: pytest.MonkeyPatch, stop: Stop) -> None:
    async def carry(self: Any, attempt: Any) -> Any:
        if type(attempt.exchange).__name__ == "Download":
            await stop.here()
        return await real(self, attempt)

    real = AsyncServer.carry
    patch.setattr(AsyncServer, "carry", carry)


async def applied(client: gradserve.aio.Client, name: str) -> Any:
    model = await client.gradient_accumulator({"w": ONES}, shared_name=name)
    return model.apply_grad({"w": ONES})


async def pushed(client: gradserve.aio.Client, name: str) -> Any:
    model = await client.gradient_accumulator({"w": ONES}, shared_name=name)
    return model.push_pull({"w": ONES}, 1)


async def stored(client: gradserve.aio.Client, _name: str) -> Any:
    return client.put(ONES)


CANCELLED = {
    "an apply whose upload is stored": (applied, after_the_upload_is_stored),
    "a put that is stored": (stored, after_the_upload_is_stored),
    "an apply that is being added": (applied, while_the_gradient_is_added),
    "a push_pull whose average is on its way": (pushed, before_the_download),
}


@pytest.mark.parametrize("case", CANCELLED)
async def test_cancelled_calls_leave_no_tensors(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    begin, stop_at = CANCELLED[case]
    stop = Stop()
    async with gradserve.aio.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        call = asyncio.ensure_future(await begin(client, name))
        stop_at(monkeypatch, stop)
        await asyncio.to_thread(stop.reached.wait, PATIENCE_SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stop.go_on()
        await eventually_async(client.list_tensors, lambda left: left == [])


async def test_a_client_that_is_closed_at_once_has_cleaned_up(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    async with gradserve.aio.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        call = asyncio.ensure_future(await pushed(client, name))
        before_the_download(monkeypatch, stop)
        await asyncio.to_thread(stop.reached.wait, PATIENCE_SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    with gradserve.connect(address) as other:
        assert other.list_tensors() == []


class InterruptionError(Exception):
    """What the handler of a signal raises."""


@contextmanager
def interrupted(stop: Stop) -> Iterator[None]:
    """Raises an exception in the main thread once a call has been stopped."""

    def handler(_number: int, _frame: object) -> None:
        raise InterruptionError

    def interrupt() -> None:
        stop.reached.wait(PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(InterruptionError):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


BLOCKING: dict[str, Callable[[gradserve.Client, str], Any]] = {
    "put": lambda client, _: client.put(LONG),
    "put with progress": lambda client, _: client.put(LONG, progress=lambda *_: None),
    "several puts": lambda client, _: client.put([LONG, LONG]),
    "apply": lambda client, name: client.gradient_accumulator({"w": LONG}, shared_name=name).apply_grad({"w": LONG}),
    "push_pull": lambda client, name: client.gradient_accumulator({"w": LONG}, name).push_pull({"w": LONG}, 1),
}


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("case", BLOCKING)
def test_an_interrupted_upload_ends(address: str, name: str, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    stop = Stop()
    real = TensorServicer._take_parts

    async def take_parts(self: Any, *given: Any) -> None:
        await stop.here()
        await real(self, *given)

    monkeypatch.setattr(TensorServicer, "_take_parts", take_parts)
    threads = set(threading.enumerate())
    with gradserve.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        with interrupted(stop):
            BLOCKING[case](client, name)
        eventually(lambda: stop.num_there == 0)  # without going on: the server was told that the upload has ended
        stop.go_on()
        assert client.get(client.put(ONES), release=True).shape == ONES.shape
        assert client.list_tensors() == []
    eventually(lambda: {each for each in threading.enumerate() if "gradserve" not in each.name} <= threads)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_an_interrupted_upload_that_is_complete_leaves_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    after_the_upload_is_stored(monkeypatch, stop)
    with gradserve.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        with interrupted(stop):
            client.put(ONES)
        stop.go_on()
        eventually(client.list_tensors, lambda left: left == [])
