"""Serves the HTTP port."""

import asyncio
import errno
import logging
import socket
import ssl
import time

from gradserve_server.observe.http.connection import HttpConnection
from gradserve_server.observe.http.unsent import UnsentBodies
from gradserve_server.observe.http.views import Views
from gradserve_server.runtime.files import reason_of

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 128
_ACCEPTED_AT_ONCE = 16
_PAUSE_SECONDS = 0.1
_CLOSE_SECONDS = 1.0
_QUIET_SECONDS = 60.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpPort:
    """Serves the HTTP port on a socket that is bound already. Made and used on one event loop.

    A connection counts from the moment in which it is accepted, before its handshake. Where there is no room for
    another, the oldest of those that wait for a request makes way.
    """

    def __init__(self, views: Views, tls: ssl.SSLContext | None) -> None:
        """Takes what answers requests, and the certificates if there are any."""
        self._views = views
        self._tls = tls
        self._unsent = UnsentBodies()
        self._connections: dict[asyncio.Task[None], HttpConnection] = {}
        self._last_report = float("-inf")

    async def serve(self, bound: socket.socket, stop: asyncio.Event) -> None:
        """Takes requests until `stop` is set; then ends those that do not end by themselves within a second."""
        loop = asyncio.get_running_loop()
        loop.add_reader(bound, self._accept, bound)
        try:
            await stop.wait()
        finally:
            loop.remove_reader(bound)
            await self._close()

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._report(f"cannot accept a connection: {reason_of(error)}")
                    self._pause(bound)
                    return
                continue  # it broke before it was accepted
            sock.setblocking(False)
            self._begin(sock)

    def _pause(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(bound)
        loop.call_later(_PAUSE_SECONDS, loop.add_reader, bound, self._accept, bound)

    def _begin(self, sock: socket.socket) -> None:
        if len(self._connections) >= MOST_CONNECTIONS and not self._make_room():
            sock.close()
            return
        connection = HttpConnection(sock, self._tls, self._views.answer, self._unsent)
        task = asyncio.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(self._ended)

    def _make_room(self) -> bool:
        for task, connection in self._connections.items():
            if connection.is_waiting and not task.cancelling():
                task.cancel()
                return True
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report("a request has failed", error)

    def _report(self, text: str, error: BaseException | None = None) -> None:
        """Logs a failure, but only once in a while, because clients may cause it again and again."""
        now = time.monotonic()
        if now - self._last_report >= _QUIET_SECONDS:
            self._last_report = now
            _log.error("%s", text, exc_info=error)

    async def _close(self) -> None:
        for task, connection in self._connections.items():
            if connection.is_waiting:
                task.cancel()
        await self._views.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_CLOSE_SECONDS)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
