"""The HTTP port, which is bound when the server starts, and served by a thread of its own."""

import asyncio
import logging
import socket
import threading
from functools import partial

from gradserve.address import Address
from gradserve_server.observe.shown import Shown
from gradserve_server.runtime.files import reason_of

_log = logging.getLogger(__name__)

DEFAULT_PORT = 50080
_BACKLOG = 64


class ObservationPort:
    """The HTTP port of a server, or none. Used on the server's event loop, and served in a thread beside it."""

    def __init__(self, wanted: str, shown: Shown) -> None:
        """Takes HOST:PORT, "auto" or "off", and what the port shows."""
        self._wanted = wanted
        self._shown = shown
        self._bound: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()
        self.address: Address | None = None
        """Where it listens, once it is bound; None if it does not."""

    @property
    def url(self) -> str:
        """The address as a URL; empty if there is no port."""
        return "" if self.address is None else f"http{'s' if self._shown.tls else ''}://{self.address}/"

    @property
    def is_served(self) -> bool:
        """True while the thread of the port takes requests."""
        return self._serving is not None

    def bind(self) -> None:
        """Binds the address. If there is no free port on the loopback interface for "auto", there is no HTTP port.

        Raises:
            OSError: The address that was asked for cannot be bound.
        """
        if self._wanted == "off":
            return
        if self._wanted != "auto":
            self._bind(Address.to_listen(self._wanted))
            return
        for port in (DEFAULT_PORT, 0):
            try:
                self._bind(Address("127.0.0.1", port))
            except OSError as error:
                if port == 0:
                    _log.warning("no HTTP port: %s", error)
            else:
                return

    def serve(self) -> None:
        """Begins to take requests; the first may wait a moment for what is still being imported."""
        if self._bound is not None:
            run = partial(self._run, self._bound, asyncio.get_running_loop())
            self._thread = threading.Thread(target=run, name="gradserve-http", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """Closes the port."""
        self._hurry.set()
        with self._lock:
            if self._serving is not None:
                loop, stop = self._serving
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._bound is not None:
            self._bound.close()

    def _bind(self, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((address.host, address.port))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise OSError(f"cannot listen for HTTP on {address}: {reason_of(error)}") from None
        bound.setblocking(False)
        self._bound = bound
        self.address = Address(address.host, bound.getsockname()[1])

    def _run(self, bound: socket.socket, server_loop: asyncio.AbstractEventLoop) -> None:
        try:
            from gradserve_server.observe.http.assembly import make_loop

            with asyncio.Runner(loop_factory=partial(make_loop, self._hurry)) as runner:
                runner.run(self._serve(bound, server_loop))
        except Exception:
            # Nothing that trains depends on it.
            _log.exception("the HTTP port cannot be served")
            bound.close()

    async def _serve(self, bound: socket.socket, server_loop: asyncio.AbstractEventLoop) -> None:
        from gradserve_server.observe.http.assembly import make_port

        stop = asyncio.Event()
        with self._lock:
            self._serving = asyncio.get_running_loop(), stop
        if self._hurry.is_set():
            stop.set()
        try:
            await make_port(self._shown, server_loop).serve(bound, stop)
        finally:
            with self._lock:
                self._serving = None
