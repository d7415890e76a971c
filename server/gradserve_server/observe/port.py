"""The HTTP port: bound when the server starts, then served by a separate thread within a budget of processor time."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradserve_protocol.address import Address
from gradserve_server.observe.logs import LogMemory
from gradserve_server.observe.status.source import StatusSource
from gradserve_server.runtime.files import reason_of
from gradserve_server.security.identity import Credentials, Identity

SHARE = 0.1
"""The fraction of its time in which the thread may compute."""
BURST_SECONDS = 1.0
"""The longest time it may compute without a pause after it has rested."""
DEFAULT_PORT = 50080
_BACKLOG = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HttpContext:
    """The data that the HTTP port shows, and who may see it.

    Attributes:
        status: Takes snapshots of the server on the server's event loop.
        identify: Returns the identity of a caller; raises UnauthenticatedError. Thread-safe.
        asks_for_token: Whether requests must carry a token.
        hosts: The names of this server that Host headers may contain, besides localhost.
        tls: The certificates; None if the port is not encrypted.
        logs: The latest lines of the log.
    """

    status: StatusSource
    identify: Callable[[Credentials], Identity]
    asks_for_token: bool
    hosts: tuple[str, ...]
    tls: ssl.SSLContext | None
    logs: LogMemory


class ObservationPort:
    """The HTTP port of a server, if it has one. Used on the server's event loop; served in a separate thread."""

    def __init__(self, wanted: str, context: HttpContext) -> None:
        """Takes HOST:PORT, "auto" or "off", and what the port shows."""
        self._wanted = wanted
        self._context = context
        self._bound: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()
        self.address: Address | None = None
        """The address once bound; None without a port."""

    @property
    def url(self) -> str:
        """The address as a URL; empty if there is no port."""
        return "" if self.address is None else f"http{'s' if self._context.tls else ''}://{self.address}/"

    @property
    def is_served(self) -> bool:
        """True while the thread of the port takes requests."""
        return self._serving is not None

    def bind(self) -> None:
        """Binds the address. With "auto", a server that finds no free port on the loopback interface has no HTTP port.

        Raises:
            OSError: The requested address cannot be bound.
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
        """Starts to serve requests; the first may wait a moment for imports."""
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
            with asyncio.Runner(loop_factory=self._make_loop) as runner:
                runner.run(self._serve(bound, server_loop))
        except Exception:
            # Training does not depend on it.
            _log.exception("the HTTP port cannot be served")
            bound.close()

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(RestingSelector(self._hurry))

    async def _serve(self, bound: socket.socket, server_loop: asyncio.AbstractEventLoop) -> None:
        # Imported in this thread, so that the server need not wait for h11 and prometheus_client.
        from gradserve_server.observe.http.port import HttpPort
        from gradserve_server.observe.http.views import Guard, Latest, Pictures, Views

        context = self._context
        guard = Guard(context.identify, asks_for_token=context.asks_for_token, hosts=context.hosts)
        pictures = Pictures(Latest(context.status.snapshot, server_loop))
        views = Views(guard, pictures, Latest(context.status.figures, server_loop), context.logs)
        port = HttpPort(views, context.tls)
        stop = asyncio.Event()
        with self._lock:
            self._serving = asyncio.get_running_loop(), stop
        if self._hurry.is_set():
            stop.set()
        try:
            await port.serve(bound, stop)
        finally:
            with self._lock:
                self._serving = None


class RestingSelector(selectors.DefaultSelector):
    """The selector of an event loop; its thread rests between two iterations while its budget is used up."""

    def __init__(self, hurry: threading.Event) -> None:
        super().__init__()
        self._budget = CpuBudget()
        self._hurry = hurry

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Rests if necessary, then waits for events."""
        debt = self._budget.debt()
        if debt:
            self._hurry.wait(debt)
        return super().select(timeout)


class CpuBudget:
    """A limit on the processor time of one thread.

    Python's threads take turns, so without it clients that keep this thread busy would slow down all others.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        share: float = SHARE,
        burst: float = BURST_SECONDS,
    ) -> None:
        self._clock = clock
        self._used = used
        self._share = share
        self._burst = burst
        self._left = burst
        self._at, self._used_before = clock(), used()

    def debt(self) -> float:
        """Returns how many seconds the thread must rest before it may go on; 0 if it need not."""
        now, used = self._clock(), self._used()
        self._left += (now - self._at) * self._share - (used - self._used_before)
        self._left = min(self._left, self._burst)
        self._at, self._used_before = now, used
        return max(-self._left / self._share, 0.0)
