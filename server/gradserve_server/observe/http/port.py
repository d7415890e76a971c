"""Serves the HTTP port."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from gradserve_server.observe.http.guard import Guard, Handler
from gradserve_server.observe.http.views import Views

_MOST_CONNECTIONS = 128
_FIRST_REQUEST_SECONDS = 10.0
_IDLE_SECONDS = 30.0
_CLOSE_SECONDS = 1.0


class HttpPort:
    """Serves the HTTP port on a socket that is bound already. Made and used on one event loop.

    Connections are bounded in number, and those that send no request within some seconds are ended.
    """

    def __init__(self, guard: Guard, views: Views, tls: ssl.SSLContext | None) -> None:
        """Takes what checks requests, what answers them, and the certificates if there are any."""
        self._silent: set[asyncio.BaseTransport] = set()
        self._num_connections = 0
        app = web.Application(middlewares=[_noting(self._silent.discard), guard.middleware], client_max_size=1)
        app.on_response_prepare.append(guard.on_prepare)
        app.add_routes(views.routes)
        self._views = views
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, keepalive_timeout=_IDLE_SECONDS, shutdown_timeout=_CLOSE_SECONDS
        )
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def serve(self, bound: socket.socket) -> None:
        """Takes requests from now on, and returns."""
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._protocol, sock=bound, ssl=self._tls)

    async def close(self) -> None:
        """Closes the port, and ends requests that do not end by themselves within a second."""
        if self._server is not None:
            self._server.close()
        await self._views.close()
        with suppress(RuntimeError):  # it was not set up
            await self._runner.cleanup()

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None, "it is set up"
        return _Bounded(self._runner.server(), self)

    def begin(self, transport: asyncio.BaseTransport) -> bool:
        """Counts a connection, and ends it later if it stays silent; returns False if there are too many."""
        self._num_connections += 1
        self._silent.add(transport)
        asyncio.get_running_loop().call_later(_FIRST_REQUEST_SECONDS, self._end_if_silent, transport)
        return self._num_connections <= _MOST_CONNECTIONS

    def end(self, transport: asyncio.BaseTransport) -> None:
        """Forgets a connection that has ended."""
        self._num_connections -= 1
        self._silent.discard(transport)

    def _end_if_silent(self, transport: Any) -> None:
        if transport in self._silent:
            transport.abort()


class _Bounded(asyncio.Protocol):
    """aiohttp's protocol of one connection, counted."""

    def __init__(self, protocol: Any, port: HttpPort) -> None:
        self._protocol = protocol
        self._port = port
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if not self._port.begin(transport):
            self._transport.abort()
        self._protocol.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._port.end(self._transport)
        self._protocol.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        self._protocol.eof_received()
        return None

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _noting(spoke: Callable[[Any], object]) -> Any:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        spoke(request.transport)
        return await handler(request)

    return note
