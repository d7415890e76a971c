"""Conversations on a socket that a task waits for. Each turn of the event loop moves a bounded number of bytes."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import (
    NO_SIGNAL,
    ConnectedSocket,
    Connection,
    Probe,
    TimeLimit,
)
from gradserve.transport.sockets.conversation import Fill, Receive, Send, buffers_of
from gradserve.transport.sockets.secure import SecureConnection
from gradserve_protocol.frames import Buffers

_TURN_BYTES = 1 << 20


class AsyncConnection(Connection):
    """A connection that a task waits for."""

    @staticmethod
    async def _connected(place: Place, seconds: float) -> socket.socket:
        async with asyncio.timeout(seconds):
            if place.path:
                return await _connected(socket.socket(socket.AF_UNIX), place.path)
            loop = asyncio.get_running_loop()
            failure: OSError | None = None
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                try:
                    return await _connected(socket.socket(family, kind, protocol), address)
                except OSError as error:
                    failure = error
            raise failure or OSError(f"the name {place.host} has no address")

    @staticmethod
    async def _ready(sock: ConnectedSocket, seconds: float, *, sends: bool) -> bool:
        return await ready(sock, seconds, sends=sends)

    async def _send(self, step: Send, limit: TimeLimit, probe: Probe) -> None:
        sent = buffers_of(step.buffers, step.progress, step.descriptor)
        await self._move_all(step, sent, _send, limit, probe, sends=True)

    async def _fill(self, step: Fill, limit: TimeLimit) -> None:
        await self._move_all(step, buffers_of(step.buffers, step.progress), _fill, limit, self._stalled, sends=False)

    async def _move_all(
        self,
        step: Send | Fill,
        own: Buffers,
        move: Callable[[ConnectedSocket, Buffers], int | None],
        limit: TimeLimit,
        probe: Probe,
        *,
        sends: bool,
    ) -> None:
        """Sends or fills buffers, on the socket and its strands at the same time; see `_move`."""
        if not step.on_strands:
            return await self._move(self._socket, own, move, limit, probe, sends=sends)
        sockets = (self._socket, *self._strands)
        parts = (own, *(buffers_of(each, step.progress) for each in step.on_strands))
        return await all_of(
            self._move(sock, part, move, limit, probe, sends=sends) for sock, part in zip(sockets, parts, strict=True)
        )

    async def _move(
        self,
        sock: ConnectedSocket,
        buffers: Buffers,
        move: Callable[[ConnectedSocket, Buffers], int | None],
        limit: TimeLimit,
        probe: Probe,
        *,
        sends: bool,
    ) -> None:
        """Sends or fills buffers; `move` returns how many bytes it moved, 0 at the end, or None if it has to wait."""
        in_turn = 0
        while buffers.left:
            try:
                num_bytes = move(sock, buffers)
            except OSError as error:
                raise self.lost(error) from None
            if num_bytes is None:
                in_turn = 0
                if not await ready(sock, limit.patience(), sends=sends):
                    limit.left()
                    await probe(self.place)
                continue
            if not num_bytes:
                raise self.lost(None)
            buffers.advance(num_bytes)
            in_turn += num_bytes
            if in_turn >= _TURN_BYTES and buffers.left:
                in_turn = 0
                await asyncio.sleep(0)

    async def _receive(self, step: Receive, limit: TimeLimit, probe: Probe) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            if not await ready(self._socket, limit.patience(), sends=False):
                limit.left()
                await probe(self.place)
                continue
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                continue
        return num_bytes

    async def _stalled(self, _place: Place) -> None:
        raise self.stalled()


class SecureAsyncConnection(SecureConnection, AsyncConnection):
    """An encrypted connection that a task waits for."""

    async def _receive(self, step: Receive, limit: TimeLimit, probe: Probe) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                if not await ready(self._socket, limit.patience(), sends=False):
                    limit.left()
                    await probe(self.place)
        return num_bytes


async def all_of(coroutines: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs coroutines at the same time until all have ended. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


async def ready(sock: ConnectedSocket, seconds: float, *, sends: bool) -> bool:
    """Waits until a socket can send or receive; returns False if it cannot for so long."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if sends else (loop.add_reader, loop.remove_reader)
    ready: asyncio.Future[bool] = loop.create_future()
    # asyncio describes at length a socket object that it does not know yet, so it gets the number.
    descriptor = sock.fileno()
    add(descriptor, _found_ready, ready, remove, descriptor)
    timer = loop.call_later(seconds, _settle, ready, False)
    is_ready = False
    try:
        is_ready = await ready
    finally:
        timer.cancel()
        if not is_ready:
            remove(descriptor)
    return is_ready


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _send(sock: ConnectedSocket, buffers: Buffers) -> int | None:
    try:
        return sock.sendmsg(buffers.next(_TURN_BYTES), buffers.ancillary, NO_SIGNAL)
    except BlockingIOError:
        return None


def _fill(sock: ConnectedSocket, buffers: Buffers) -> int | None:
    try:
        return sock.recvmsg_into(buffers.next(_TURN_BYTES))[0]
    except BlockingIOError:
        return None


def _found_ready(ready: asyncio.Future[bool], remove: Callable[[int], object], descriptor: int) -> None:
    remove(descriptor)  # at once, or the loop finds it ready again before the task runs
    _settle(ready, True)


def _settle(ready: asyncio.Future[bool], value: bool) -> None:
    if not ready.done():
        ready.set_result(value)


async def _connected(made: socket.socket, address: Any) -> socket.socket:
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made
