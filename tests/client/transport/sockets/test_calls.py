"""Calls over real sockets, of both clients: what takes which way, and what becomes of calls that end early."""

import asyncio
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.combinators import together
from gradserve.calls.exchange import TimeLimits, Unary
from gradserve.calls.retries import Attempt
from gradserve.results import TransportInfo
from gradserve.testing import FaultyProxy
from gradserve.transport.driving import completed
from gradserve.transport.settings import ConnectionSettings, Keepalive, SocketSettings, Transport
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.announcing import announce, bulk_address
from tests.servers.connecting import NO_RETRIES, carrier_of, connect_with, connect_with_aio, no_server, transport_of
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async, growing_limits
from tests.servers.runtime import NOT_WARMED_UP

WAYS = ["shared_memory", "bulk", "grpc"]
LARGE = np.arange(2_000_000, dtype=np.float32)
NO_UNIX = "shared_memory: the server has no socket for it"


@pytest.fixture
def own_server() -> Iterator[LocalServer]:
    """A server for one test, which can announce other sockets."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
def test_every_call(server_address: str, name: str, way: Any) -> None:
    with gradserve.connect(server_address, transport=way) as client:
        acc = client.conditional_accumulator("float32", LARGE.shape, name)
        assert acc.apply_grad(LARGE).outcome is gradserve.ACCEPTED
        np.testing.assert_array_equal(acc.take_grad(1), LARGE)
        small = client.conditional_accumulator("float32", (3,))
        small.apply_grad([1, 2, 3])
        average = small.take_grad(1)
        assert average.tolist() == [1, 2, 3]
        average[:] = 0  # whoever gets it owns it
        handles = client.put_all([LARGE, [1], np.zeros((0, 2))])
        first, second, third = client.get_all([*handles[:2], handles[2]], release=True)
        np.testing.assert_array_equal(first, LARGE)
        assert (second.tolist(), third.shape) == ([1], (0, 2))
        assert client.delete(*handles) == 0
        layer = client.batch_norm()
        x = np.random.default_rng(1).normal(size=(1000, 1000)).astype(np.float32)
        assert layer(x).shape == x.shape
        with pytest.raises(gradserve.InvalidArgumentError) as error:
            acc.apply_grad(LARGE[:5], request_id=9)
        assert (error.value.field, error.value.request_id) == ("gradient[0].dense.shape", 9)
        info = client.server_info()
        assert info.transport.way == way
        assert [each.partition(":")[0] for each in info.sockets] == ["*", "unix"]
        acc.delete()


@pytest.mark.parametrize("way", WAYS)
async def test_every_call_aio(server_address: str, name: str, way: Any) -> None:
    async with gradserve.aio.connect(server_address, transport=way) as client:
        acc = await client.conditional_accumulator("float32", LARGE.shape, name)
        results = await asyncio.gather(*(acc.apply_grad(LARGE) for _ in range(3)))
        assert {result.outcome for result in results} == {gradserve.ACCEPTED}
        np.testing.assert_array_equal(await acc.take_grad(3), LARGE)
        handle = await client.put(LARGE)
        np.testing.assert_array_equal(await client.get(handle, release=True), LARGE)
        with pytest.raises(gradserve.NotFoundError):
            await client.get(handle)
        assert (await client.server_info()).transport.way == way
        await acc.delete()


def test_a_loop_goes_on_while_a_large_call_is_under_way(server_address: str) -> None:
    async def main() -> int:
        turns = 0
        async with gradserve.aio.connect(server_address, transport="bulk") as client:
            await client.server_info()
            put = asyncio.create_task(client.put(LARGE))
            while not put.done():
                await asyncio.sleep(0)
                turns += 1
            await client.delete(put.result())
        return turns

    assert asyncio.run(main()) >= LARGE.nbytes >> 20


def test_automatic_choice(own_server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    bulk = bulk_address(own_server)
    with gradserve.connect(own_server.address) as client:
        assert client.server_info().transport == TransportInfo("shared_memory", "")
    announce(own_server, tcp=[bulk])
    with gradserve.connect(own_server.address) as client:
        assert client.server_info().transport == TransportInfo("bulk", NO_UNIX)
    announce(own_server, tcp=[bulk], unix_path="/nowhere/at/all.sock")
    with gradserve.connect(own_server.address) as client:
        transport = client.server_info().transport
        assert transport.way == "bulk"
        assert transport.why_not_faster.startswith("shared_memory: no connection to unix:/nowhere/at/all.sock: ")
    announce(own_server)
    with caplog.at_level(logging.INFO, "gradserve"), gradserve.connect(own_server.address) as client:
        for _ in range(3):
            assert client.server_info().transport == TransportInfo(
                "grpc", f"{NO_UNIX}; bulk: the server has no socket for it"
            )
    assert [record.levelname for record in caplog.records if record.name == "gradserve"] == ["INFO"]


class Listener:
    """A TCP socket where something else than a gradserve server is."""

    def __init__(self, react: Callable[[socket.socket], None]) -> None:
        self._react = react
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_accepted = 0
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> "Listener":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for each in self._accepted:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            self.num_accepted += 1
            self._accepted.append(accepted)
            self._react(accepted)


def answer_like_a_web_server(accepted: socket.socket) -> None:
    accepted.recv(1)
    accepted.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: another one\r\nConnection: close\r\n\r\n")
    accepted.shutdown(socket.SHUT_RDWR)


REACTIONS: dict[str, Callable[[socket.socket], None]] = {
    "closes": lambda accepted: accepted.shutdown(socket.SHUT_RDWR),
    "is silent": lambda accepted: None,
    "speaks HTTP": answer_like_a_web_server,
}
QUICK = ConnectionSettings(TimeLimits(PATIENCE_SECONDS), sockets=SocketSettings(connect=0.5, hello=0.2))


@pytest.fixture(params=["nobody listens", "another server", *REACTIONS])
def wrong_place(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a bulk socket that does not work."""
    with ExitStack() as stack:
        if request.param == "nobody listens":
            yield stack.enter_context(no_server())
        elif request.param == "another server":
            yield bulk_address(stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP))))
        else:
            yield stack.enter_context(Listener(REACTIONS[request.param])).address


def test_a_socket_that_does_not_work(
    own_server: LocalServer, wrong_place: str, caplog: pytest.LogCaptureFixture
) -> None:
    announce(own_server, tcp=[wrong_place])
    with caplog.at_level(logging.INFO, "gradserve"), connect_with(own_server.address, QUICK) as client:
        acc = client.conditional_accumulator("float32", LARGE.shape)
        acc.apply_grad(LARGE)
        np.testing.assert_array_equal(acc.take_grad(1), LARGE)
        transport = client.server_info().transport
    assert transport.way == "grpc"
    assert transport.why_not_faster.startswith(f"{NO_UNIX}; bulk: ")
    said = [record.getMessage() for record in caplog.records if record.name == "gradserve"]
    assert said == [f"calls to {own_server.address} go over gRPC: {transport.why_not_faster}"]
    forced = replace(QUICK, transport=Transport.BULK, retries=NO_RETRIES)
    impossible = pytest.raises(gradserve.UnavailableError, match="transport='bulk' is not possible: bulk: ")
    with connect_with(own_server.address, forced) as client, impossible:
        client.server_info()


async def test_a_socket_that_does_not_work_aio(own_server: LocalServer, wrong_place: str) -> None:
    announce(own_server, tcp=[wrong_place])
    async with connect_with_aio(own_server.address, QUICK) as client:
        acc = await client.conditional_accumulator("float32", LARGE.shape)
        await acc.apply_grad(LARGE)
        np.testing.assert_array_equal(await acc.take_grad(1), LARGE)
        assert (await client.server_info()).transport.way == "grpc"


def with_less_time_than_a_hello(limit: float) -> ConnectionSettings:
    """Returns settings of which a call has less time than the answer to a hello."""
    return replace(QUICK, times=TimeLimits(limit), sockets=SocketSettings(hello=10 * limit))


def test_a_socket_that_is_silent_leaves_a_call_time_for_grpc(own_server: LocalServer) -> None:
    for limit in growing_limits(3.0):
        with Listener(REACTIONS["is silent"]) as silent, suppress(gradserve.DeadlineExceededError):
            announce(own_server, tcp=[silent.address])
            with connect_with(own_server.address, with_less_time_than_a_hello(limit)) as client:
                assert client.server_info().transport.way == "grpc"
            assert silent.num_accepted == 1
            break


def test_a_call_that_demands_a_silent_socket_runs_out_of_time(own_server: LocalServer) -> None:
    """It says so, and not that the way is not possible, which nobody knows yet."""
    settings = replace(with_less_time_than_a_hello(0.5), transport=Transport.BULK)
    with Listener(REACTIONS["is silent"]) as silent:
        announce(own_server, tcp=[silent.address])
        with connect_with(own_server.address, settings) as client, pytest.raises(gradserve.DeadlineExceededError):
            client.server_info()


async def test_a_socket_that_is_silent_leaves_a_call_time_for_grpc_aio(own_server: LocalServer) -> None:
    for limit in growing_limits(3.0):
        with Listener(REACTIONS["is silent"]) as silent, suppress(gradserve.DeadlineExceededError):
            announce(own_server, tcp=[silent.address])
            async with connect_with_aio(own_server.address, with_less_time_than_a_hello(limit)) as client:
                assert (await client.server_info()).transport.way == "grpc"
            assert silent.num_accepted == 1
            break


@pytest.mark.parametrize("way", ["bulk", "shared_memory"])
def test_a_demanded_way_that_the_server_does_not_have(own_server: LocalServer, way: Any) -> None:
    announce(own_server)
    with (
        gradserve.connect(own_server.address, transport=way) as client,
        pytest.raises(gradserve.UnavailableError, match=f"transport='{way}' is not possible: {way}: the server has no"),
    ):
        client.server_info()


def test_the_environment(server_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_TRANSPORT", "bulk")
    with gradserve.connect(server_address) as client:
        assert client.server_info().transport.way == "bulk"
    with gradserve.connect(server_address, transport="grpc") as client:
        assert client.server_info().transport == TransportInfo("grpc", "transport='grpc' was asked for")
    monkeypatch.setenv("GRADSERVE_TRANSPORT", "carrier pigeon")
    for connect in (gradserve.connect, gradserve.aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError, match="for GRADSERVE_TRANSPORT, got 'carrier pigeon'"):
            connect(server_address)


def test_a_connection_that_breaks_leads_to_grpc(own_server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with FaultyProxy(bulk_address(own_server)) as proxy:
        announce(own_server, tcp=[proxy.address])
        client = gradserve.connect(own_server.address, timeout=PATIENCE_SECONDS)
        acc = client.conditional_accumulator("float32")
        assert client.server_info().transport.way == "bulk"
        with ThreadPoolExecutor(1) as threads, caplog.at_level(logging.INFO, "gradserve"):
            waiting = threads.submit(acc.take_grad, 1)
            eventually(lambda: acc.info().num_waiting == 1)
            proxy.cut()
            acc.apply_grad(5)
            assert waiting.result(PATIENCE_SECONDS) == 5
    assert client.server_info().transport.way == "grpc"
    (said,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert said.startswith(f"calls to {own_server.address} go over gRPC for 30 s: ")
    assert "the connection to 127.0.0.1:" in said  # one that was in use, or one that was just made
    client.close()


def test_a_server_that_restarts(tmp_path: Any) -> None:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        client = gradserve.connect(server.address, transport="bulk")
        with closing(client):
            assert client.server_info().transport.way == "bulk"
            announce(server, tcp=[bulk_address(server)])
            pool = carrier_of(client).connections
            pool.drop_idle()
            assert client.server_info().transport.way == "bulk"


SILENT = ConnectionSettings(
    TimeLimits(PATIENCE_SECONDS),
    NO_RETRIES,
    Keepalive(interval=0.2, timeout=PATIENCE_SECONDS),
    transport=Transport.BULK,
)


def test_a_reply_that_stalls(own_server: LocalServer) -> None:
    """The header of a reply comes, and then nothing more, while the server itself is well."""
    with Stalling(bulk_address(own_server)) as relay:
        announce(own_server, tcp=[relay.address])
        stalled = pytest.raises(gradserve.UnavailableError, match="stalled in the middle of a reply")
        with connect_with(own_server.address, SILENT) as client, stalled:
            client.server_info()


async def test_a_reply_that_stalls_aio(own_server: LocalServer) -> None:
    with Stalling(bulk_address(own_server)) as relay:
        announce(own_server, tcp=[relay.address])
        async with connect_with_aio(own_server.address, SILENT) as client:
            with pytest.raises(gradserve.UnavailableError, match="stalled in the middle of a reply"):
                await client.server_info()


class Stalling(Listener):
    """Passes a hello on, and cuts the reply to the first call short without closing the connection."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        super().__init__(self._relay)

    def _relay(self, accepted: socket.socket) -> None:
        with socket.create_connection(self._target) as server:
            for num_bytes in (1 << 16, 40):
                server.sendall(accepted.recv(1 << 16))
                accepted.sendall(server.recv(num_bytes))


@pytest.mark.parametrize("way", WAYS)
def test_close_ends_calls(server_address: str, name: str, way: Any) -> None:
    with gradserve.connect(server_address) as other, ThreadPoolExecutor(2) as threads:
        acc = other.conditional_accumulator("float32", (), name)
        client = gradserve.connect(server_address, transport=way)
        take = client.conditional_accumulator("float32", (), name).take_grad
        waiting = [threads.submit(take, 1, timeout=PATIENCE_SECONDS) for _ in range(2)]
        eventually(lambda: acc.info().num_waiting == 2)
        client.close()
        for each in waiting:
            with pytest.raises(gradserve.CallCancelledError, match="the client is closed"):
                each.result(PATIENCE_SECONDS)
        eventually(lambda: acc.info().num_waiting == 0)
        acc.delete()


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_gives_its_call_up(server_address: str, name: str, way: Any) -> None:
    async with gradserve.aio.connect(server_address, transport=way) as client:
        acc = await client.conditional_accumulator("float32", (), name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(acc.take_grad(1, timeout=PATIENCE_SECONDS))
        await eventually_async(num_waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually_async(num_waiting, lambda count: count == 0)
        await acc.apply_grad(3)
        assert await acc.take_grad(1) == 3
        await acc.delete()


@pytest.mark.parametrize("way", WAYS)
def test_a_call_ends_in_time(server_address: str, way: Any) -> None:
    with gradserve.connect(server_address, transport=way) as client:
        acc = client.conditional_accumulator("float32")
        with pytest.raises(gradserve.DeadlineExceededError):
            acc.take_grad(1, timeout=0.05)
        acc.apply_grad(1)
        assert acc.take_grad(1) == 1


@pytest.mark.parametrize("way", ["shared_memory", "bulk"])
def test_operations_together(server_address: str, way: Any) -> None:
    num_threads = threading.active_count()
    with gradserve.connect(server_address, transport=way) as client:
        acc = client.conditional_accumulator("float32", LARGE.shape)
        calls, transport = acc._calls, transport_of(client)
        both: list[Any] = transport.run(together(calls.apply_grad(LARGE), calls.take_grad(1)))
        applied, taken = both
        assert applied.outcome is gradserve.ACCEPTED
        np.testing.assert_array_equal(taken, LARGE)
        with pytest.raises(gradserve.InvalidArgumentError):
            transport.run(together(calls.take_grad(1), calls.apply_grad(LARGE[:1])))
        eventually(lambda: acc.info().num_waiting == 0)
        assert threading.active_count() < num_threads + 20


def test_a_call_that_is_given_up_says_nothing_about_the_way(server_address: str) -> None:
    with gradserve.connect(server_address) as client:
        acc = client.conditional_accumulator("float32", LARGE.shape)
        acc.apply_grad(LARGE)
        before = transport_of(client)._servers[0].info
        with pytest.raises(gradserve.InvalidArgumentError):
            transport_of(client).run(together(acc._calls.take_grad(9), acc._calls.apply_grad(LARGE[:1])))
        eventually(lambda: acc.info().num_waiting == 0)
        assert transport_of(client)._servers[0].info == before


def test_more_calls_at_once_than_connections(own_server: LocalServer) -> None:
    settings = replace(QUICK, sockets=SocketSettings(max_connections=2))
    with connect_with(own_server.address, settings) as client, ThreadPoolExecutor(5) as threads:
        acc = client.conditional_accumulator("float32", LARGE.shape)
        takes = [threads.submit(acc.take_grad, 1) for _ in range(5)]
        eventually(lambda: acc.info().num_waiting == 5)
        for _ in range(5):
            acc.apply_grad(LARGE, local_step=9)
        for each in takes:
            np.testing.assert_array_equal(each.result(PATIENCE_SECONDS), LARGE)


def test_a_fork_leaves_connections_alone(server_address: str) -> None:
    with gradserve.connect(server_address, transport="bulk") as client:
        acc = client.conditional_accumulator("float32")
        child = os.fork()
        if not child:
            status = 1
            try:
                client.server_info()
            except gradserve.ForkedClientError:
                del acc, client
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        acc.apply_grad(2)
        assert acc.take_grad(1) == 2


@pytest.mark.parametrize("way", ["shared_memory", "bulk"])
def test_a_forgotten_client_leaves_no_connections(own_server: LocalServer, way: Any) -> None:
    def num_connections() -> int:
        return own_server.inspect(lambda server: len(server.sockets.connections))

    client = gradserve.connect(own_server.address, transport=way)
    client.server_info()
    assert num_connections() == 1
    del client
    eventually(lambda: num_connections() == 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_client_is_forgotten_while_its_lock_is_held(own_server: LocalServer, is_async: bool) -> None:
    """The garbage collector may interrupt the thread that holds it."""

    def num_connections() -> int:
        return own_server.inspect(lambda server: len(server.sockets.connections))

    async def connected() -> Any:
        client = gradserve.aio.connect(own_server.address)
        await client.server_info()
        return client

    def forget() -> None:
        if is_async:
            client = asyncio.run(connected())
        else:
            client = gradserve.connect(own_server.address)
            client.server_info()
        lock = carrier_of(client).connections._lock
        assert num_connections() == 1
        cycle = [client]
        cycle.append(cycle)
        del client, cycle
        with lock:
            gc.collect()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    eventually(lambda: num_connections() == 0)


@pytest.mark.parametrize("way", ["shared_memory", "bulk"])
def test_an_interruption_that_is_late_ends_no_other_call(server_address: str, way: Any) -> None:
    with gradserve.connect(server_address, transport=way) as client, ThreadPoolExecutor(1) as threads:
        acc = client.conditional_accumulator("float32")
        interruptions: list[Callable[[], object]] = []
        call = Unary("ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest())
        transport: Any = transport_of(client)
        completed(transport._servers[0].carry(Attempt(call, PATIENCE_SECONDS), interruptions.append))
        waiting = threads.submit(acc.take_grad, 1)  # on the same connection
        eventually(lambda: acc.info().num_waiting == 1)
        (late,) = interruptions
        late()
        acc.apply_grad(3)
        assert waiting.result(PATIENCE_SECONDS) == 3
