"""Large tensors over several sockets of a connection, with both clients."""

import asyncio
import contextlib
import logging
import operator
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import TimeLimits
from gradserve.transport.driving import completed
from gradserve.transport.settings import ConnectionSettings, Keepalive, SocketSettings, Transport, Way
from gradserve.transport.sockets.aio import AsyncConnection
from gradserve.transport.sockets.blocking import BlockingConnection
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import TimeLimit, round_trip
from gradserve.transport.sockets.conversation import Conversation, Fill, Receive, Send
from gradserve.transport.sockets.payloads import Payloads
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.connecting import NO_RETRIES, carrier_of, connect_with, connect_with_aio
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP

LARGE = np.random.default_rng(0).normal(size=600_001).astype(np.float32)
EVERYWHERE = SocketSettings(long_round_trip=0.0, large_payload=1 << 20)
"""Every link is long."""
WIDE = ConnectionSettings(TimeLimits(PATIENCE_SECONDS), transport=Transport.BULK, sockets=EVERYWHERE)


@pytest.fixture
def own_server() -> Iterator[LocalServer]:
    """A server for one test, which can announce other sockets."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server


def test_large_tensors_take_several_sockets(server_address: str) -> None:
    with connect_with(server_address, WIDE) as client:
        acc = client.conditional_accumulator("float32", LARGE.shape)
        assert client.server_info().transport.num_sockets == 1, "nothing large was sent yet"
        for step in range(2):
            acc.apply_grad(LARGE, local_step=step)
            np.testing.assert_array_equal(acc.take_grad(1), LARGE)
        handles = client.put_all([LARGE, [1.5], -LARGE])
        first, second, third = client.get_all(handles, release=True)
        np.testing.assert_array_equal(first, LARGE)
        np.testing.assert_array_equal(third, -LARGE)
        assert second.tolist() == [1.5]
        with pytest.raises(gradserve.InvalidArgumentError):
            acc.apply_grad(LARGE[:-1])
        assert client.server_info().transport.num_sockets == 4


async def test_large_tensors_take_several_sockets_aio(server_address: str) -> None:
    async with connect_with_aio(server_address, WIDE) as client:
        acc = await client.conditional_accumulator("float32", LARGE.shape)
        results = await asyncio.gather(*(acc.apply_grad(LARGE) for _ in range(3)))
        assert {each.outcome for each in results} == {gradserve.ACCEPTED}
        np.testing.assert_allclose(await acc.take_grad(3), LARGE, rtol=1e-6)
        handle = await client.put(LARGE)
        np.testing.assert_array_equal(await client.get(handle, release=True), LARGE)
        assert (await client.server_info()).transport.num_sockets == 4


def test_a_large_reply_widens_the_connection(server_address: str) -> None:
    with connect_with(server_address, replace(WIDE, sockets=SocketSettings())) as client:
        handle = client.put(LARGE)
        with connect_with(server_address, WIDE) as reader:
            for num_sockets in (4, 4):
                np.testing.assert_array_equal(reader.get(handle), LARGE)
                assert reader.server_info().transport.num_sockets == num_sockets
        assert client.server_info().transport.num_sockets == 1, "the link is short"
        client.delete(handle)


def test_averages_that_are_read_widen_the_connection(server_address: str, name: str) -> None:
    """How large a reply will be is not known; the next one is expected to be as large."""
    with connect_with(server_address, WIDE) as reader, gradserve.connect(server_address) as writer:
        theirs = writer.conditional_accumulator("float32", LARGE.shape, name)
        ours = reader.conditional_accumulator("float32", LARGE.shape, name)
        for step, num_sockets in enumerate((1, 4)):
            theirs.apply_grad(LARGE, local_step=step)
            np.testing.assert_array_equal(ours.take_grad(1), LARGE)
            if step:
                assert reader.server_info().transport.num_sockets == num_sockets
        theirs.delete()


@pytest.mark.parametrize(
    "changes", [{"strands": 0}, {"long_round_trip": 60.0}, {"large_payload": LARGE.nbytes + 1}], ids=str
)
def test_one_socket_is_enough(server_address: str, changes: dict[str, float]) -> None:
    settings = replace(WIDE, sockets=replace(EVERYWHERE, **changes))  # type: ignore[arg-type]
    with connect_with(server_address, settings) as client:
        handle = client.put(LARGE)
        np.testing.assert_array_equal(client.get(handle, release=True), LARGE)
        assert client.server_info().transport.num_sockets == 1


def test_loopback_is_a_short_link() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as connected,
    ):
        assert 0 < round_trip(connected) < SocketSettings().long_round_trip
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert round_trip(ours) == 0


def test_a_server_that_takes_no_further_socket(own_server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    """As behind a load balancer that leads the further sockets to another server."""
    own_server.inspect(lambda server: setattr(server.sockets.context.strand_keys, "_strands", Forgetful()))
    with caplog.at_level(logging.INFO, "gradserve"), connect_with(own_server.address, WIDE) as client:
        for _ in range(2):
            handle = client.put(LARGE)
            np.testing.assert_array_equal(client.get(handle), LARGE)
        transport = client.server_info().transport
    assert (transport.way, transport.num_sockets) == ("bulk", 1)
    said = [record.getMessage() for record in caplog.records if record.name == "gradserve"]
    assert said == [
        f"large tensors to and from {own_server.address} travel over one socket at a time: "
        "no further sockets: the server refuses them with status 5"
    ]


async def test_a_server_that_takes_no_further_socket_aio(own_server: LocalServer) -> None:
    own_server.inspect(lambda server: setattr(server.sockets.context.strand_keys, "_strands", Forgetful()))
    async with connect_with_aio(own_server.address, WIDE) as client:
        handle = await client.put(LARGE)
        np.testing.assert_array_equal(await client.get(handle), LARGE)
        assert (await client.server_info()).transport.num_sockets == 1


class NowhereElse:
    """A socket whose peer does not listen."""

    family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address: tuple[str, int] = listening.getsockname()
        return address


def test_no_further_socket_can_be_connected() -> None:
    """As when a firewall limits the number of connections."""
    refused = pytest.raises(gradserve.UnavailableError, match="no further sockets: .*Errno 111")
    nowhere: Any = NowhereElse()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        blocking_one = BlockingConnection(ours, PLACE, Payloads(BufferPool(0)), QUICK)
        blocking_one._socket = nowhere
        with refused:
            completed(blocking_one.add_strands(2))
        assert blocking_one.num_strands == 0
        aio_one = AsyncConnection(ours, PLACE, Payloads(BufferPool(0)), QUICK)
        aio_one._socket = nowhere
        with refused:
            asyncio.run(aio_one.add_strands(2))
        assert aio_one.num_strands == 0


def test_a_strand_that_broke_meanwhile_ends_the_connection(own_server: LocalServer) -> None:
    def break_one(server: Any) -> None:
        (strands,) = server.sockets.context.strand_keys._strands.values()
        strands._streams[2].close()

    with connect_with(own_server.address, replace(WIDE, retries=NO_RETRIES)) as client:
        handle = client.put(LARGE)
        own_server.inspect(break_one)
        (connection,) = carrier_of(client).connections._idle
        eventually(connection.is_usable, operator.not_)
        np.testing.assert_array_equal(client.get(handle), LARGE)
        assert client.server_info().transport.num_sockets == 4


QUICK = ConnectionSettings(keepalive=Keepalive(interval=0.1, timeout=0.1))
PLACE = Place(Way.BULK, host="somewhere", port=1)


def filling(own: memoryview, other: memoryview) -> Conversation[None]:
    yield Fill((own,), len(own) + len(other), ((other,),))


def sending(own: memoryview, other: memoryview) -> Conversation[None]:
    yield Send((own,), None, ((other,),))


Converse = Callable[[socket.socket, socket.socket, Conversation[None]], None]


def blocking(own: socket.socket, strand: socket.socket, conversation: Conversation[None]) -> None:
    connection = BlockingConnection(own, PLACE, Payloads(BufferPool(0)), QUICK)
    strand.setblocking(False)
    connection._add_strands([strand])

    completed(connection.converse(conversation, TimeLimit(PATIENCE_SECONDS, QUICK), no_sign_of_life))


async def no_sign_of_life(_: Place) -> None:
    raise gradserve.UnavailableError("no sign of life")


def aio(own: socket.socket, strand: socket.socket, conversation: Conversation[None]) -> None:
    async def converse() -> None:
        own.setblocking(False)
        strand.setblocking(False)
        connection = AsyncConnection(own, PLACE, Payloads(BufferPool(0)), QUICK)
        connection._add_strands([strand])
        await connection.converse(conversation, TimeLimit(PATIENCE_SECONDS, QUICK), no_sign_of_life)

    asyncio.run(converse())


Pairs = list[tuple[socket.socket, socket.socket]]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(2)]
        for pair in pairs:
            for each in pair:
                stack.enter_context(each)
        yield pairs


@pytest.mark.parametrize("converse", [blocking, aio])
def test_a_strand_that_stalls(pairs: Pairs, converse: Converse) -> None:
    (own, peer), (strand, _) = pairs
    peer.sendall(b"own")
    with pytest.raises(gradserve.UnavailableError, match="stalled in the middle of a reply"):
        converse(own, strand, filling(memoryview(bytearray(3)), memoryview(bytearray(3))))


@pytest.mark.parametrize("converse", [blocking, aio])
def test_a_strand_that_nobody_reads(pairs: Pairs, converse: Converse) -> None:
    (own, peer), (strand, _) = pairs

    def then_receive() -> Conversation[None]:
        yield from sending(memoryview(b"own"), memoryview(bytes(10 << 20)))
        yield Receive(memoryview(bytearray(1)), 1)

    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(gradserve.UnavailableError, match="no sign of life"):
        converse(own, strand, then_receive())


@pytest.mark.parametrize("converse", [blocking, aio])
@pytest.mark.parametrize("moving", [filling, sending])
def test_a_strand_that_breaks(
    pairs: Pairs, converse: Converse, moving: Callable[[memoryview, memoryview], Conversation[None]]
) -> None:
    (own, own_peer), (strand, peer) = pairs
    peer.close()

    def then_receive() -> Conversation[None]:
        yield from moving(memoryview(bytearray(3)), memoryview(bytearray(10)))
        yield Receive(memoryview(bytearray(1)), 1)

    own_peer.shutdown(socket.SHUT_WR)
    with pytest.raises(gradserve.UnavailableError, match="was lost"):
        converse(own, strand, then_receive())


class Forgetful(dict[bytes, object]):
    """Keys that are never found."""

    def get(self, key: bytes, default: object = None) -> object:
        return default
