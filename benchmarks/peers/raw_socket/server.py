"""A server with a thread for each connection, which keeps nothing and adds nothing up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.driver import Setup, run_server
from benchmarks.peers.raw_socket.wire import GET, PUT, REQUEST, receive


class Puts:
    """The number of finished puts that no get has waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self) -> None:
        """Counts one more."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def take(self, count: int) -> None:
        """Waits until there are so many, and takes them away."""
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)
            self._count -= count


def serve_connection(connection: socket.socket, num_bytes: int, puts: Puts) -> None:
    """Answers requests until the client closes the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(num_bytes))
    request = memoryview(bytearray(REQUEST.size))
    with connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            receive(connection, request)
            kind, length, num_puts = REQUEST.unpack(request)
            if kind == PUT:
                receive(connection, memory[:length])
                puts.add()
                connection.sendall(b"\0")
            elif kind == GET:
                puts.take(num_puts)
                connection.sendall(memory[:length])


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[dict[str, Any]]:
    """Listens, and accepts connections in a thread; the process ends when the parent says so."""
    host, _, port = setup.options.get("listen", "127.0.0.1:0").rpartition(":")
    listener = socket.create_server((host, int(port)))
    puts = Puts()

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            arguments = (connection, int(setup.options["num_bytes"]), puts)
            threading.Thread(target=serve_connection, args=arguments, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield {"address": f"{host}:{listener.getsockname()[1]}"}


if __name__ == "__main__":
    run_server(serve)
