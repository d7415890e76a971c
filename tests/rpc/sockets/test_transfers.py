"""Payloads moved by a few threads."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

import pytest

from gradserve_server.rpc.listeners.sockets.transfers import Discarding, Job, Receiving, Sending, Transfers

Pair: TypeAlias = tuple[socket.socket, socket.socket]
MIB = 1 << 20


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    made = Transfers(2, 60.0)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, other = socket.socketpair()
    with ours, other:
        ours.setblocking(False)
        yield ours, other


async def settled(task: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        await task


async def test_both_ways(transfers: Transfers, pair: Pair) -> None:
    ours, other = pair
    other.setblocking(False)
    data = bytes(range(256)) * (10 * MIB // 256)
    received = bytearray(len(data))
    pieces: list[bytes | memoryview] = [b"", data[:5], data[5 : 6 * MIB], b"", memoryview(data)[6 * MIB :]]
    await asyncio.gather(transfers.run(Sending(ours, pieces)), transfers.run(Receiving(other, memoryview(received))))
    assert received == data


async def test_very_many_pieces(transfers: Transfers, pair: Pair) -> None:
    ours, other = pair
    other.setblocking(False)
    received = bytearray(3 * 5000)
    await asyncio.gather(
        transfers.run(Sending(ours, [b"abc"] * 5000)), transfers.run(Receiving(other, memoryview(received)))
    )
    assert received == b"abc" * 5000


async def test_what_is_discarded_is_read_and_no_more(transfers: Transfers, pair: Pair) -> None:
    ours, other = pair
    sending = asyncio.create_task(asyncio.to_thread(other.sendall, bytes(MIB) + b"rest"))
    await transfers.run(Discarding(ours, MIB))
    await sending
    assert ours.recv(10) == b"rest"


async def test_nothing_to_do(transfers: Transfers, pair: Pair) -> None:
    ours, _ = pair
    for job in (Sending(ours, [b""]), Receiving(ours, memoryview(b"")), Discarding(ours, 0)):
        await transfers.run(job)


@pytest.mark.parametrize("kind", ["receiving", "discarding", "sending"])
async def test_the_other_side_leaves(transfers: Transfers, pair: Pair, kind: str) -> None:
    ours, other = pair
    jobs: dict[str, Job] = {
        "receiving": Receiving(ours, memoryview(bytearray(100))),
        "discarding": Discarding(ours, 100),
        "sending": Sending(ours, [bytes(10 * MIB)]),
    }
    task = asyncio.create_task(transfers.run(jobs[kind]))
    await asyncio.to_thread(other.recv, 1) if kind == "sending" else other.send(b"x")
    other.close()
    with pytest.raises(ConnectionError):
        await task


@pytest.mark.parametrize("turns", range(6))
async def test_memory_of_a_cancelled_transfer_is_not_touched_any_more(
    transfers: Transfers, pair: Pair, turns: int
) -> None:
    ours, other = pair
    memory = bytearray(8 * MIB)
    task = asyncio.create_task(transfers.run(Receiving(ours, memoryview(memory))))
    for _ in range(turns):
        await asyncio.sleep(0)
    sender = threading.Thread(target=_send_and_leave, args=(other, b"\1" * len(memory)))
    sender.start()
    task.cancel()
    await settled(task)
    seen = bytes(memory)
    ours.setblocking(True)
    drained = sum(iter(lambda: len(ours.recv(MIB)), 0))
    sender.join()
    assert bytes(memory) == seen
    assert drained + seen.count(1) == len(memory)


def _send_and_leave(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


async def test_cancelled_again_and_again(transfers: Transfers, pair: Pair) -> None:
    ours, other = pair
    for _ in range(20):
        task = asyncio.create_task(transfers.run(Receiving(ours, memoryview(bytearray(10)))))
        await asyncio.sleep(0)
        task.cancel()
        await settled(task)
    memory = bytearray(3)
    other.sendall(b"abc")
    await transfers.run(Receiving(ours, memoryview(memory)))
    assert memory == b"abc"


@pytest.mark.parametrize("first", [b"", b"some"])
async def test_silence(pair: Pair, first: bytes) -> None:
    ours, other = pair
    transfers = Transfers(1, 0.05)
    try:
        other.sendall(first)
        with pytest.raises(TimeoutError, match=r"silent for more than 0\.05 s"):
            await transfers.run(Receiving(ours, memoryview(bytearray(100))))
    finally:
        transfers.close()


def transfer_threads() -> set[threading.Thread]:
    """Those of servers that other tests use are among them."""
    return {each for each in threading.enumerate() if each.name.startswith("gradserve-transfer")}


async def test_many_slow_sockets_share_the_threads() -> None:
    before = transfer_threads()
    transfers = Transfers(2, 60.0)
    pairs = [socket.socketpair() for _ in range(100)]
    try:
        assert len(transfer_threads() - before) == 2
        for ours, _ in pairs:
            ours.setblocking(False)
        memories = [bytearray(2) for _ in pairs]
        tasks = [
            asyncio.create_task(transfers.run(Receiving(ours, memoryview(memory))))
            for (ours, _), memory in zip(pairs, memories, strict=True)
        ]
        for _, other in pairs:
            other.sendall(b"a")
        fast, fast_other = socket.socketpair()
        with fast, fast_other:
            fast.setblocking(False)
            fast_other.sendall(b"xyz")
            memory = bytearray(3)
            await transfers.run(Receiving(fast, memoryview(memory)))
        assert not any(task.done() for task in tasks)
        for _, other in pairs:
            other.sendall(b"b")
        await asyncio.gather(*tasks)
        assert memories == [bytearray(b"ab")] * 100
    finally:
        transfers.close()
        for each in pairs:
            each[0].close()
            each[1].close()
    assert transfer_threads() <= before


async def test_closing_ends_what_is_under_way(pair: Pair) -> None:
    transfers = Transfers(1, 60.0)
    task = asyncio.create_task(transfers.run(Receiving(pair[0], memoryview(bytearray(5)))))
    await asyncio.sleep(0)
    transfers.close()
    with pytest.raises(ConnectionAbortedError, match="the server is shutting down"):
        await task


async def test_a_job_that_fails_ends_alone(transfers: Transfers, pair: Pair) -> None:
    ours, other = pair

    class Broken:
        events = 1
        is_done = False

        def __init__(self) -> None:
            self.sock = ours

        def step(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await transfers.run(Broken())
    memory = bytearray(1)
    other.sendall(b"x")
    await transfers.run(Receiving(ours, memoryview(memory)))
    assert memory == b"x"
