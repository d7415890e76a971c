"""Operations that run together over gRPC, on one server and on two: both transports do the same."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

import gradserve
from gradserve.calls.accumulators.operations import ConditionalAccumulatorCalls
from gradserve.calls.client import ClientCalls
from gradserve.calls.combinators import at_target, together
from gradserve.calls.exchange import Operation, Pause, TimeLimits, Unary
from gradserve.calls.identity import RequestIds
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.address import Address
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_testing import LocalServer, ServerThread
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async

T = TypeVar("T")

LARGE = np.arange(300_000, dtype=np.float64)
SETTINGS = ConnectionSettings(TimeLimits(PATIENCE_SECONDS))


class Blocking:
    """Runs operations with the blocking transport."""

    def __init__(self, *addresses: str) -> None:
        self._transport = NetworkTransport([Address.to_connect(each) for each in addresses], SETTINGS)

    def run(self, operation: Operation[T]) -> T:
        return self._transport.run(operation)

    def close(self) -> None:
        self._transport.close()


class Asyncio:
    """Runs operations with the transport for asyncio, each on the event loop of this object."""

    def __init__(self, *addresses: str) -> None:
        self._runner = asyncio.Runner()
        self._transport = self._runner.run(self._connect(addresses))

    async def _connect(self, addresses: tuple[str, ...]) -> AsyncNetworkTransport:
        return AsyncNetworkTransport([Address.to_connect(each) for each in addresses], SETTINGS)

    def run(self, operation: Operation[T]) -> T:
        return self._runner.run(self._transport.run(operation))

    def close(self) -> None:
        self._runner.run(self._transport.close())
        self._runner.close()


@pytest.fixture(scope="module")
def other_server(_compiled_kernels: None) -> Iterator[LocalServer]:
    with LocalServer() as local:
        yield local


@pytest.fixture(params=[Blocking, Asyncio])
def transport(
    request: pytest.FixtureRequest, server_address: str, other_server: LocalServer
) -> Iterator[Blocking | Asyncio]:
    made: Blocking | Asyncio = request.param(server_address, other_server.address)
    yield made
    made.close()


@pytest.fixture
def calls() -> ClientCalls:
    return ClientCalls(RequestIds("someone"), SETTINGS.times)


@pytest.fixture
def accumulators(
    transport: Blocking | Asyncio, calls: ClientCalls, name: str
) -> Iterator[list[ConditionalAccumulatorCalls]]:
    """One on each server."""
    made = [
        transport.run(at_target(target, calls.conditional_accumulator("float64", (2,), name))) for target in range(2)
    ]
    yield made
    for target, each in enumerate(made):
        transport.run(at_target(target, each.delete()))


def test_operations_go_to_their_targets(transport: Any, calls: ClientCalls) -> None:
    handles = transport.run(together(*(at_target(target, calls.put([1.0, 2.0])) for target in range(2))))
    for target, handle in enumerate(handles):
        with pytest.raises(gradserve.NotFoundError):
            transport.run(at_target(1 - target, calls.get(handle)))
        assert transport.run(at_target(target, calls.get(handle, release=True))).tolist() == [1, 2]


def test_both_servers_are_asked_at_once(transport: Any, accumulators: list[ConditionalAccumulatorCalls]) -> None:
    """The take of each server ends only when the other operation has gone on: one after the other is for ever."""
    first, second = accumulators

    def crosswise(taken: int, applied: int) -> Operation[Any]:
        if taken == 0:
            yield from at_target(applied, accumulators[applied].apply_grad([1.0 + applied, 0.0]))
        average = yield from at_target(taken, accumulators[taken].take_grad(1))
        if taken == 1:
            yield from at_target(applied, accumulators[applied].apply_grad([1.0 + applied, 0.0]))
        return average

    averages = transport.run(together(crosswise(0, 1), crosswise(1, 0)))
    assert [average.tolist() for average in averages] == [[1.0, 0.0], [2.0, 0.0]]
    assert transport.run(first.num_accumulated()) == 0
    assert transport.run(at_target(1, second.num_accumulated())) == 0


def test_streams_run_together(transport: Any, calls: ClientCalls) -> None:
    handles = transport.run(together(*(at_target(target, calls.put(LARGE + target)) for target in (0, 1, 0))))
    arrays = transport.run(
        together(
            *(
                at_target(target, calls.get(handle, release=True))
                for target, handle in zip((0, 1, 0), handles, strict=True)
            )
        )
    )
    for target, array in zip((0, 1, 0), arrays, strict=True):
        np.testing.assert_array_equal(array, LARGE + target)


def test_pauses_run_together(transport: Any, calls: ClientCalls) -> None:
    ended: list[float] = []

    def pausing(seconds: float) -> Operation[float]:
        yield Pause(seconds)
        ended.append(seconds)
        return seconds

    operations: list[Operation[Any]] = [pausing(0.7), pausing(0.1), calls.server_info(), pausing(0.4)]
    results = transport.run(together(*operations))
    assert [results[0], results[1], results[3]] == [0.7, 0.1, 0.4]
    assert ended == [0.1, 0.4, 0.7]


def test_the_first_error_ends_the_others(
    transport: Any, calls: ClientCalls, accumulators: list[ConditionalAccumulatorCalls]
) -> None:
    ended: list[str] = []

    def taking() -> Operation[Any]:
        try:
            return (yield from accumulators[0].take_grad(1, timeout=PATIENCE_SECONDS))
        except gradserve.GradserveError as error:
            ended.append(str(error))
            raise

    def failing() -> Operation[Any]:
        yield from _until_waiting(accumulators[0])
        return (yield from at_target(1, calls.get(gradserve.TensorHandle("?", LARGE.dtype, LARGE.shape))))

    with pytest.raises(gradserve.NotFoundError):
        transport.run(together(taking(), failing()))
    assert ended == ["cancelled: another of the operations that ran together has failed [GS_CANCELLED]"]
    eventually(lambda: transport.run(accumulators[0].info()).num_waiting == 0)


def _until_waiting(accumulator: ConditionalAccumulatorCalls) -> Operation[None]:
    while not (yield from accumulator.info()).num_waiting:
        yield Pause(0.01)


def test_streams_and_pauses_are_ended_too(transport: Any, calls: ClientCalls) -> None:
    handle = transport.run(calls.put(LARGE))

    def pausing() -> Operation[None]:
        yield Pause(1000)

    def reading() -> Operation[None]:
        while True:
            yield from calls.get(handle)

    def writing() -> Operation[None]:
        while True:
            yield from calls.delete((yield from calls.put(LARGE)))

    def failing() -> Operation[None]:
        yield Pause(0.1)
        yield from calls.delete_accumulator("of nobody")
        raise gradserve.AbortedError("enough")

    with pytest.raises(gradserve.AbortedError, match="enough"):
        transport.run(together(pausing(), reading(), writing(), failing()))
    transport.run(calls.delete(handle))


@pytest.mark.parametrize("kind", [Blocking, Asyncio])
def test_a_call_ends_that_waits_for_a_ticket(
    kind: type[Blocking | Asyncio], server_address: str, calls: ClientCalls
) -> None:
    """The first call to a server asks for a ticket, which a server that hangs does not issue."""
    with ServerThread() as server, ThreadPoolExecutor(1) as threads:
        hangs = server.faults.delay(1e6, "IssueTicket", times=None)
        transport = kind(server_address, server.address)

        def failing() -> Operation[None]:
            while not hangs.happened:
                yield Pause(0.01)
            raise gradserve.AbortedError("enough")

        asking = at_target(1, calls.server_info())
        try:
            together_run = threads.submit(transport.run, together(asking, failing()))
            with pytest.raises(gradserve.AbortedError, match="enough"):
                together_run.result(PATIENCE_SECONDS / 4)
        finally:
            transport.close()


def test_operations_run_in_the_calling_thread(transport: Any, calls: ClientCalls) -> None:
    """So a worker has one identity, however much it does at once."""

    def identified() -> Operation[tuple[int, str]]:
        yield from calls.server_info()
        return threading.get_ident(), calls._ids.worker_id()

    assert set(transport.run(together(identified(), identified()))) == {(threading.get_ident(), calls._ids.worker_id())}


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT is an interrupt, also in a run in the background of a shell, which would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_ends_all(transport: Any, accumulators: list[ConditionalAccumulatorCalls]) -> None:
    ended: list[str] = []

    def taking(target: int) -> Operation[Any]:
        try:
            yield from at_target(target, accumulators[target].take_grad(1, timeout=PATIENCE_SECONDS))
        finally:
            ended.append("closed")

    def interrupting() -> Operation[None]:
        yield from _until_waiting(accumulators[0])
        yield from at_target(1, _until_waiting(accumulators[1]))
        signal.raise_signal(signal.SIGINT)
        yield Pause(1000)

    with pytest.raises(KeyboardInterrupt):
        transport.run(together(taking(0), taking(1), interrupting()))
    assert ended == ["closed", "closed"]

    def num_waiting() -> int:
        infos = transport.run(together(*(at_target(target, each.info()) for target, each in enumerate(accumulators))))
        return sum(info.num_waiting for info in infos)

    eventually(lambda: num_waiting() == 0)


def test_a_thread_that_cannot_start_leaves_no_other(
    server_address: str, calls: ClientCalls, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take that waited on would take an average that nobody gets."""
    transport = Blocking(server_address)
    accumulator = transport.run(calls.conditional_accumulator("float64", (2,), name))
    start, begun = threading.Thread.start, list[str]()

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "gradserve-call":
            begun.append(thread.name)
            if len(begun) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            transport.run(together(accumulator.take_grad(1), accumulator.num_accumulated()))
        assert not [each for each in threading.enumerate() if each.name == "gradserve-call"]
        transport.run(accumulator.apply_grad([1.0, 2.0]))
        assert transport.run(accumulator.take_grad(1)).tolist() == [1.0, 2.0]
    finally:
        transport.close()


def test_closing_ends_all(server_address: str, other_server: LocalServer, calls: ClientCalls, name: str) -> None:
    transport = Blocking(server_address, other_server.address)
    accumulator = transport.run(calls.conditional_accumulator("float64", (2,), name))

    def pausing() -> Operation[None]:
        yield Pause(1000)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transport.run, together(accumulator.take_grad(1), pausing()))
        eventually(lambda: transport.run(accumulator.info()).num_waiting == 1)
        transport.close()
        with pytest.raises(gradserve.CallCancelledError, match="the client is closed"):
            waiting.result(PATIENCE_SECONDS)
    with pytest.raises(gradserve.CallCancelledError, match="the client is closed"):
        transport.run(together(calls.server_info(), calls.put(LARGE)))
    with gradserve.connect(server_address) as client:
        client.delete_accumulator(name)


async def test_closing_and_cancelling_end_all_aio(
    server_address: str, other_server: LocalServer, calls: ClientCalls, name: str
) -> None:
    transport = AsyncNetworkTransport(
        [Address.to_connect(each) for each in (server_address, other_server.address)], SETTINGS
    )
    accumulator = await transport.run(calls.conditional_accumulator("float64", (2,), name))
    before = asyncio.all_tasks()

    async def num_waiting() -> int:
        return (await transport.run(accumulator.info())).num_waiting

    async def take() -> asyncio.Task[Any]:
        task = asyncio.create_task(transport.run(together(accumulator.take_grad(1), accumulator.take_grad(1))))
        await eventually_async(num_waiting, lambda count: count == 2)
        return task

    task = await take()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually_async(num_waiting, lambda count: count == 0)
    assert {each for each in asyncio.all_tasks() - before if "gradserve" in repr(each.get_coro())} == set()
    task = await take()
    await transport.close()
    with pytest.raises(gradserve.CallCancelledError, match="the client is closed"):
        await task
    with gradserve.connect(server_address) as client:
        client.delete_accumulator(name)


def test_what_renews_a_call_goes_to_the_same_server() -> None:
    call = Unary("ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest())

    def ask(exchange: Unary) -> Operation[Any]:
        return (yield exchange)

    aimed = next(at_target(1, ask(call._replace(renewal=lambda: ask(call)))))
    assert isinstance(aimed, Unary)
    assert aimed.renewal is not None
    renewing = next(aimed.renewal())
    assert isinstance(renewing, Unary)
    assert (aimed.target, renewing.target) == (1, 1)
