"""Callers are told how far transfers are: with both clients, over every way."""

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import CallbackError, TimeLimits, Track
from gradserve.face import BlockingFace
from gradserve.testing import FaultyProxy
from gradserve.transport import progress
from gradserve.transport.progress import ProgressLine, TransferProgress
from gradserve.transport.settings import ConnectionSettings, SocketSettings, Transport
from gradserve_protocol.tls import client_certificates
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.connecting import connect_with, connect_with_aio
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP

LARGE = np.random.default_rng(0).integers(0, 256, 6 << 20, np.uint8)
SEVERAL = [LARGE, np.ones(3), np.zeros((0, 2)), LARGE[: 1 << 20]]
GRADIENT = np.ones((1 << 20) + (1 << 19), np.float32)
NUM_BYTES = sum(each.nbytes for each in SEVERAL)
STRANDS = SocketSettings(long_round_trip=0.0, large_payload=1 << 20)
ONE_SOCKET = SocketSettings(strands=0)
WAYS: dict[str, ConnectionSettings] = {
    "shared memory": ConnectionSettings(transport=Transport.SHARED_MEMORY),
    "bulk": ConnectionSettings(transport=Transport.BULK, sockets=ONE_SOCKET),
    "bulk, several sockets": ConnectionSettings(transport=Transport.BULK, sockets=STRANDS),
    "TLS": ConnectionSettings(transport=Transport.BULK, sockets=ONE_SOCKET),
    "TLS, several sockets": ConnectionSettings(transport=Transport.BULK, sockets=STRANDS),
    "gRPC": ConnectionSettings(transport=Transport.GRPC),
}

Report = Callable[[int, int], object]


@dataclass
class Reports:
    """What a callback was told, and in which thread."""

    told: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def __call__(self, num_done: int, num_bytes: int) -> None:
        self.told.append((num_done, num_bytes))
        self.threads.add(threading.get_ident())


@dataclass
class Refusing:
    """A callback that raises an error once so many bytes were moved."""

    error: Exception
    num_bytes: int
    num_raised: int = 0

    def __call__(self, num_done: int, _num_bytes: int) -> None:
        if num_done >= self.num_bytes:
            self.num_raised += 1
            raise self.error


class Awaited:
    """Lets the blocking client, and what it makes, be called as those of asyncio."""

    def __init__(self, blocking: BlockingFace[Any]) -> None:
        self._blocking = blocking

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def method(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self._blocking, name)(*args, **kwargs)
            return Awaited(result) if isinstance(result, BlockingFace) else result

        return method


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def plain() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        yield local


@pytest.fixture(scope="module")
def encrypted(certificates: Certificates) -> Iterator[LocalServer]:
    with LocalServer(certificates.config()) as local:
        yield local


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(way: str, request: pytest.FixtureRequest) -> LocalServer:
    local: LocalServer = request.getfixturevalue("encrypted" if way.startswith("TLS") else "plain")
    return local


@pytest.fixture(params=["blocking", "aio"])
async def client(
    request: pytest.FixtureRequest, way: str, server: LocalServer, certificates: Certificates
) -> AsyncIterator[Any]:
    files = client_certificates(certificates.client()) if way.startswith("TLS") else None
    settings = replace(WAYS[way], times=TimeLimits(PATIENCE_SECONDS), certificates=files)
    if request.param == "blocking":
        with connect_with(server.address, settings) as connected:
            yield Awaited(connected)
    else:
        async with connect_with_aio(server.address, settings) as connected_aio:
            yield connected_aio


@pytest.fixture
def _every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks are called as often as there is something to tell."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0)


def check(reports: Reports, num_bytes: int) -> None:
    done = [each for each, _ in reports.told]
    assert {total for _, total in reports.told} == {num_bytes}
    assert done[0] == 0
    assert done == sorted(set(done)), "they never fall, and nothing is told twice"
    assert done[-1] == num_bytes
    assert len(done) >= 5, "they come while the transfer is under way"
    assert reports.threads == {threading.get_ident()}
    reports.told.clear()


@pytest.mark.usefixtures("_every_piece")
async def test_what_is_told(client: Any, way: str) -> None:
    reports = Reports()
    handle = await client.put(LARGE, progress=reports)
    check(reports, LARGE.nbytes)
    np.testing.assert_array_equal(await client.get(handle, progress=reports), LARGE)
    check(reports, LARGE.nbytes)
    out = np.zeros_like(LARGE)
    assert await client.get(handle, out=out, release=True, progress=reports) is out
    np.testing.assert_array_equal(out, LARGE)
    check(reports, LARGE.nbytes)
    handles = await client.put_all(SEVERAL, progress=reports)
    check(reports, NUM_BYTES)
    outs = [np.zeros_like(each) for each in SEVERAL]
    for arrays in (
        await client.get_all(handles, progress=reports),
        await client.get_all(handles, out=outs, release=True, progress=reports),
    ):
        for array, expected in zip(arrays, SEVERAL, strict=True):
            np.testing.assert_array_equal(array, expected)
    assert reports.told[-1] == (NUM_BYTES, NUM_BYTES)
    if way.endswith("several sockets"):
        assert (await client.server_info()).transport.num_sockets == 4


async def test_small_transfers_take_one_step(client: Any) -> None:
    reports = Reports()
    handle = await client.put([1.0, 2.0], progress=reports)
    assert (await client.get(handle, release=True, progress=reports)).tolist() == [1, 2]
    (empty,) = await client.put_all([np.zeros((0, 3))], progress=reports)
    await client.delete(empty)
    assert reports.told == [*[(0, 16), (16, 16)] * 2, (0, 0), (0, 0)]


async def test_an_array_that_is_shared_takes_one_step(plain: LocalServer) -> None:
    with gradserve.connect(plain.address, transport="shared_memory") as client:
        array = client.empty(LARGE.shape, LARGE.dtype)
        array[:] = LARGE
        reports = Reports()
        client.delete(client.put(array, progress=reports))
    assert reports.told == [(0, LARGE.nbytes), (LARGE.nbytes, LARGE.nbytes)]


@pytest.mark.usefixtures("_every_piece")
@pytest.mark.parametrize("num_bytes", [0, 1 << 20, LARGE.nbytes], ids=["first", "midway", "last"])
async def test_a_callback_that_raises(client: Any, server: LocalServer, num_bytes: int) -> None:
    handle = await client.put(LARGE)
    used = use_of(server)
    # An error that would be a reason to try again, if it came from the call.
    for error in (ValueError("enough"), gradserve.UnavailableError("no more")):
        for call, changes in (("put", {}), ("put_all", {}), ("get", {}), ("get", {"out": np.zeros_like(LARGE)})):
            given = LARGE if call == "put" else [LARGE] if call == "put_all" else handle
            refusing = Refusing(error, num_bytes)
            with pytest.raises(type(error)) as raised:
                await getattr(client, call)(given, progress=refusing, **changes)
            assert raised.value is error
            assert error.__cause__ is None
            assert not isinstance(error.__context__, CallbackError)
            assert refusing.num_raised == 1
            np.testing.assert_array_equal(await client.get(handle), LARGE)
    assert [each.handle for each in await client.list_tensors()] == [handle.handle]
    eventually(lambda: use_of(server), used.__eq__)
    assert await client.delete(handle) == 1


@pytest.mark.usefixtures("_every_piece")
async def test_gradients_and_averages(client: Any) -> None:
    reports = Reports()
    dense = await client.conditional_accumulator("float32", GRADIENT.shape)
    await dense.apply_grad(GRADIENT, progress=reports)
    check(reports, GRADIENT.nbytes)
    np.testing.assert_array_equal(await dense.take_grad(1, progress=reports), GRADIENT)
    check(reports, GRADIENT.nbytes)
    np.testing.assert_array_equal(await dense.read_average(progress=reports), GRADIENT)
    check(reports, GRADIENT.nbytes)


@pytest.mark.usefixtures("_every_piece")
async def test_sparse_gradients_and_averages(client: Any) -> None:
    reports = Reports()
    rows = GRADIENT.reshape(-1, 1 << 10)
    indices = np.arange(len(rows))
    num_bytes = rows.nbytes + indices.nbytes
    sparse = await client.sparse_conditional_accumulator("float32", rows.shape)
    await sparse.apply_grad(indices, rows, progress=reports)
    check(reports, num_bytes)
    await sparse.apply_indexed_slices_grad(gradserve.IndexedSlices(rows, indices), progress=reports)
    check(reports, num_bytes)
    assert (await sparse.take_grad(2, progress=reports)).values.shape == rows.shape
    check(reports, num_bytes)
    assert (await sparse.read_average(progress=reports)).values.shape == rows.shape
    check(reports, num_bytes)


@pytest.mark.usefixtures("_every_piece")
async def test_gradients_and_averages_of_a_model(client: Any) -> None:
    reports = Reports()
    gradients = {"w": GRADIENT, "b": np.ones(3, np.float32)}
    num_bytes = GRADIENT.nbytes + 12
    model = await client.gradient_accumulator(gradients, keep_averages=2)
    await model.apply_grad(gradients, progress=reports)
    check(reports, num_bytes)
    assert (await model.take_grad(1, progress=reports)).num_gradients == 1
    check(reports, num_bytes)
    assert (await model.read_average(progress=reports)).num_gradients == 1
    check(reports, num_bytes)
    assert (await model.push_pull(gradients, 1, 1, progress=reports)).num_gradients == 1
    before = [each for each in reports.told if each[1] == num_bytes]
    after = [each for each in reports.told if each[1] == 2 * num_bytes]
    assert reports.told == before + after, "the total grows once, when the average begins to come"
    assert (before[0][0], after[0][0]) == (0, num_bytes)
    assert len(before) >= 5
    reports.told = after
    check(Reports([(done - num_bytes, total - num_bytes) for done, total in after], reports.threads), num_bytes)


@pytest.mark.usefixtures("_every_piece")
async def test_a_gradient_that_is_given_up_does_not_count(client: Any, server: LocalServer) -> None:
    accumulator = await client.conditional_accumulator("float32", GRADIENT.shape, keep_averages=2)
    used = use_of(server)
    refusing = Refusing(ValueError("enough"), 1 << 20)
    with pytest.raises(ValueError, match="enough"):
        await accumulator.apply_grad(GRADIENT, progress=refusing)
    assert await accumulator.num_accumulated() == 0
    eventually(lambda: use_of(server), used.__eq__)
    await accumulator.apply_grad(GRADIENT)
    stored = await client.list_tensors()
    for least in (0, 1 << 20):
        refusing = Refusing(ValueError("enough"), least)
        with pytest.raises(ValueError, match="enough"):
            await getattr(accumulator, "read_average" if least else "take_grad")(1, progress=refusing)
        assert refusing.num_raised == 1
    np.testing.assert_array_equal(await accumulator.read_average(1), GRADIENT)
    assert await client.list_tensors() == stored


async def test_whatever_needs_no_transfer_takes_one_step(client: Any) -> None:
    reports = Reports()
    accumulator = await client.conditional_accumulator("float32", (2,))
    handle = await client.put(np.ones(2, np.float32))
    await accumulator.apply_grad(handle, progress=reports)
    assert (await accumulator.take_grad(1, progress=reports)).tolist() == [1, 1]
    await client.delete(handle)
    assert reports.told == [(0, 0), (0, 0), (0, 8), (8, 8)]
    with pytest.raises(gradserve.InvalidArgumentError, match="for progress, got 3"):
        await accumulator.apply_grad([1, 2], progress=3)


def use_of(server: LocalServer) -> tuple[int, int, int]:
    """Returns what tensors and arriving payloads take."""
    return server.inspect(lambda each: (len(each.store), each.usage.memory.used, each.sockets.context.in_flight.used))


@pytest.mark.usefixtures("_every_piece")
@pytest.mark.parametrize("face", ["blocking", "aio"])
async def test_an_upload_that_is_sent_again(plain: LocalServer, face: str) -> None:
    """The network breaks in the middle of it, when much more is left than connections hold."""
    given, reports = np.zeros(64 << 20, np.uint8), Reports()
    with FaultyProxy(plain.address) as network:

        def report(num_done: int, num_bytes: int) -> None:
            reports(num_done, num_bytes)
            if num_done >= 3 << 20 and not cut:
                cut.append(num_done)
                network.cut()
                network.heal()

        cut: list[int] = []
        settings = replace(WAYS["gRPC"], times=TimeLimits(PATIENCE_SECONDS))
        async with contextlib.AsyncExitStack() as stack:
            client: Any
            if face == "blocking":
                client = Awaited(stack.enter_context(connect_with(network.address, settings)))
            else:
                client = await stack.enter_async_context(connect_with_aio(network.address, settings))
            await client.server_info()
            handle = await client.put(given, progress=report)
            assert cut
            check(reports, given.nbytes)
            assert [each.handle for each in await client.list_tensors()] == [handle.handle]
            await client.delete(handle)


async def test_a_call_that_fails_tells_nothing_more(client: Any) -> None:
    reports = Reports()
    with pytest.raises(gradserve.NotFoundError):
        await client.get(gradserve.TensorHandle("nobody's", np.dtype("float32"), (1 << 20,)), progress=reports)
    assert reports.told == [(0, 4 << 20)]


async def test_what_is_no_progress(client: Any) -> None:
    handle = await client.put([1.0], progress=False)
    for call, given in (("put", [1.0]), ("put_all", [[1.0]]), ("get", handle), ("get_all", [handle])):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a callable, True, False or None for prog"):
            await getattr(client, call)(given, progress=1)
    assert await client.delete(handle) == 1


class Terminal(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True


async def test_a_line_on_a_terminal(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal):
        handle = await client.put(LARGE, progress=True)
        array = await client.get(handle, release=True, progress=True)
    np.testing.assert_array_equal(array, LARGE)
    put, got, rest = terminal.getvalue().split("\n")
    for line in (put, got):
        assert line.startswith("\r[                        ]   0 %  0.0 of 6.0 MiB, 0.0 MiB/s")
        assert "\r[########################] 100 %  6.0 of 6.0 MiB, " in line
    assert rest == ""
    with contextlib.redirect_stderr(terminal), pytest.raises(gradserve.NotFoundError):
        await client.get(handle, progress=True)
    assert terminal.getvalue().endswith("\x1b[K\n"), "whatever is written next begins a line"


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
async def test_nothing_is_written_elsewhere(client: Any, stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    await client.get(await client.put(LARGE, progress=True), release=True, progress=True)
    assert stderr is None or stderr.getvalue() == ""


def test_reports_are_bounded() -> None:
    now = 0.0
    told = []
    tracked = TransferProgress(lambda done, _: told.append(done), clock=lambda: now)
    with tracked:
        tracked.sends(1000)
        tracked.begin()
        for _ in range(900):
            tracked.moved(1)
            now += 0.001
        tracked.end()
    assert len(told) == 2 + 900 // 50 - 1
    assert told[-1] == 1000


def test_a_transfer_that_begins_again_is_told_of_once_it_is_further() -> None:
    told = []
    tracked = TransferProgress(lambda done, _: told.append(done), clock=iter(range(100)).__next__)
    with tracked:
        tracked.receives(100)
        for overhead in (0, 10):
            tracked.begin(overhead)
            for _ in range(5):
                tracked.moved(15)
        tracked.moved(100)
        tracked.end()
    assert told == [0, 15, 30, 45, 60, 75, 100]


def test_a_line_says_how_fast_it_is() -> None:
    terminal = Terminal()
    line = ProgressLine(terminal, "state", clock=iter([0.0, 2.0]).__next__)
    line.end()
    assert terminal.getvalue() == "", "nothing was shown"
    line(3 << 30, 6 << 30)
    line.end()
    line.end()
    shown = "\rstate [############            ]  50 %  3,072.0 of 6,144.0 MiB, 1,536.0 MiB/s\x1b[K\n"
    assert terminal.getvalue() == shown


def test_without_a_terminal_nobody_is_told() -> None:
    with contextlib.redirect_stderr(io.StringIO()), TransferProgress.of(Track(True)) as tracked:
        tracked.end()


async def test_a_cancelled_upload_is_still_cancelled(plain: LocalServer) -> None:
    async with connect_with_aio(plain.address, WAYS["gRPC"]) as client:
        under_way = asyncio.Event()
        upload = asyncio.create_task(client.put(np.zeros(64 << 20, np.uint8), progress=lambda *_: under_way.set()))
        await under_way.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert await client.list_tensors() == []
