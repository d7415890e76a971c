"""The pool of connections: which one carries the next call, and when they are closed."""

import socket
from typing import Any

import pytest

import gradserve
from gradserve.transport.settings import ConnectionSettings, SocketSettings, Way
from gradserve.transport.sockets.blocking import BlockingConnection
from gradserve.transport.sockets.carrier import ConnectionPool
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import Connection
from gradserve.transport.sockets.payloads import Payloads
from gradserve_protocol.memory.pool import BufferPool


class Pool:
    """A pool with its own clock, and the other ends of its connections."""

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        self.pool: ConnectionPool = ConnectionPool(SocketSettings(**settings), lambda: self.now)
        self.ends: list[socket.socket] = []
        self.connections: list[Connection] = []

    def open(self) -> Connection:
        assert self.pool.reserve()
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        place = Place(Way.SHARED_MEMORY, path="/nowhere")
        connection = BlockingConnection(ours, place, Payloads(BufferPool(0)), ConnectionSettings())
        self.connections.append(connection)
        self.pool.add(connection)
        return connection

    def is_closed(self, number: int) -> bool:
        self.ends[number].setblocking(False)
        try:
            return self.ends[number].recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.pool.close()
        for connection in self.connections:
            connection.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def pool() -> Any:
    made = Pool()
    yield made
    made.close()


def test_the_one_used_last_is_used_first(pool: Pool) -> None:
    first, second = pool.open(), pool.open()
    assert pool.pool.take() is None
    pool.pool.give_back(second)
    pool.pool.give_back(first)
    assert [pool.pool.take(), pool.pool.take(), pool.pool.take()] == [first, second, None]
    pool.pool.drop(first)
    pool.pool.drop(second)


def test_idle_ones_are_closed_after_a_while(pool: Pool) -> None:
    first, second = pool.open(), pool.open()
    pool.pool.give_back(first)
    pool.now += 59
    pool.pool.give_back(second)
    assert not pool.is_closed(0)
    pool.now += 2
    assert pool.pool.take() is second
    assert pool.is_closed(0)
    assert not pool.is_closed(1)
    pool.pool.drop(second)
    assert pool.is_closed(1)


class ReadingPayloads(Payloads):
    @property
    def reads_in_place(self) -> bool:
        return True


def test_idle_ones_whose_memory_is_read_stay_open(pool: Pool) -> None:
    reading, unused, used = pool.open(), pool.open(), pool.open()
    reading.payloads = ReadingPayloads(BufferPool(0))
    pool.pool.give_back(reading)
    pool.pool.give_back(unused)
    pool.now += 61
    pool.pool.give_back(used)
    assert pool.pool.take() is used
    assert [pool.is_closed(number) for number in range(3)] == [False, True, False]
    reading.payloads = unused.payloads
    pool.pool.give_back(used)
    assert pool.pool.take() is used
    assert pool.is_closed(0)
    pool.pool.drop(used)


@pytest.mark.parametrize("ending", ["closed", "sent something"])
def test_one_that_the_server_ended_is_not_used(pool: Pool, ending: str) -> None:
    first, second = pool.open(), pool.open()
    pool.pool.give_back(first)
    pool.pool.give_back(second)
    if ending == "closed":
        pool.ends[1].shutdown(socket.SHUT_WR)
    else:
        pool.ends[1].send(b"!")
    assert pool.pool.take() is first
    assert len(pool.pool) == 1
    pool.pool.drop(first)


def test_there_are_not_too_many() -> None:
    pool = Pool(max_connections=2)
    first = pool.open()
    assert pool.pool.reserve()
    assert not pool.pool.reserve()
    pool.pool.cancel()
    pool.open()
    assert not pool.pool.reserve()
    pool.pool.drop(first)
    assert pool.pool.reserve()
    pool.close()


def test_a_closed_pool(pool: Pool) -> None:
    idle, busy = pool.open(), pool.open()
    pool.pool.give_back(idle)
    assert pool.pool.reserve()
    pool.pool.close()
    assert pool.is_closed(0)
    assert pool.is_closed(1)  # interrupted: whoever waits for a reply gets the end instead
    ours, theirs = socket.socketpair()
    late = BlockingConnection(ours, busy.place, busy.payloads, ConnectionSettings())
    with theirs:
        with pytest.raises(gradserve.CallCancelledError, match="closed"):
            pool.pool.add(late)
        assert theirs.recv(1) == b""
    for use in (pool.pool.take, pool.pool.reserve):
        with pytest.raises(gradserve.CallCancelledError, match="closed"):
            use()
    pool.pool.give_back(busy)
    assert len(pool.pool) == 0


def test_a_late_interruption_ends_no_other_call(pool: Pool) -> None:
    """The call has ended, and its connection carries one of another thread, before somebody gives up the first one."""
    connection = pool.open()
    late = pool.pool.interruption(connection)
    pool.pool.give_back(connection)
    late()
    assert not pool.is_closed(0)
    assert pool.pool.take() is connection
    late()
    assert not pool.is_closed(0)
    pool.pool.interruption(connection)()
    assert pool.is_closed(0)


def test_a_connection_is_not_used_again_after_an_interruption(pool: Pool) -> None:
    """It came at the last moment: the call had its answer."""
    connection = pool.open()
    pool.pool.interruption(connection)()
    pool.pool.give_back(connection)
    assert pool.pool.take() is None
