"""A gRPC server on some addresses, and its replacement if a client brings it down."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from gradserve.address import Address
from gradserve.lasting import lasting_task
from gradserve.transport.route import Route
from gradserve_server.rpc.listeners.ports import Ports

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_BIND_PAUSE_SECONDS = 0.02
_QUIET_SECONDS = 60.0
_FOR_EVER_SECONDS = 1e9
_PROBE_SECONDS = 5.0
_INSTEAD_OF_PROBE_SECONDS = 0.1

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Endpoint:
    """A gRPC server and its ports. Made and used on one event loop; serves once."""

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        loopbacks: Sequence[str],
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._ports = Ports(self._server, loopbacks, credentials)
        self._has_started = False

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports picked for port 0, and with absolute paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        return [self._ports.bind(address) for address in addresses]

    async def start(self) -> None:
        """Starts serving. A cancellation waits until it serves: gRPC's server fails if its start is broken off."""
        self._has_started = True
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def failure(self) -> Exception | None:
        """Waits until it no longer serves; returns the reason, or None if it was stopped."""
        while True:
            try:
                if not await self._server.wait_for_termination(_LOOK_SECONDS):
                    return None
            except Exception as error:
                return error

    def remove_files(self) -> None:
        """Removes the files of its Unix sockets."""
        self._ports.remove_files()

    async def stop(self, grace: float) -> None:
        """Closes the ports, lets calls under way go on for `grace` seconds, then ends them with UNAVAILABLE.

        May be called again before it is done, with another `grace`.
        """
        if not self._has_started:
            await self.start()  # gRPC releases bound ports only after a start
        try:
            await self._server.stop(grace)
        except UnicodeDecodeError:
            # The last call brought gRPC's server down; now it can be stopped.
            await self._server.stop(grace)


class LastingEndpoint:
    """A gRPC server that serves until it is stopped, whatever clients send.

    A call of a method whose name is not UTF-8 ends the loop in which gRPC's asyncio server takes calls. Calls under way
    then go on over their connections, and a moment later another gRPC server takes new ones on the same addresses.
    Clients find their connection closed, and open another one.
    """

    def __init__(self, make: Callable[[], Endpoint], *, is_encrypted: bool = False) -> None:
        """Takes a function that makes an unbound endpoint, and whether its TCP ports use TLS."""
        self._make = make
        self._is_encrypted = is_encrypted
        self._current = make()
        self._addresses: list[Address] = []
        self._supervision: asyncio.Task[None] | None = None
        self._abandoned: dict[Endpoint, asyncio.Task[None]] = {}
        self._last_report = float("-inf")
        self._has_failed = False
        """True from the end of the current endpoint until another one serves."""

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; see `Endpoint.bind`."""
        self._addresses = self._current.bind(addresses)
        return self._addresses

    async def start(self) -> None:
        """Starts serving."""
        await self._current.start()
        self._supervision = lasting_task("the replacement of gRPC's server", self._supervise, _log)

    async def probe(self) -> None:
        """Makes a health check of itself, as a client does, and waits for the answer, whatever it is.

        A server with TLS has no certificate of a client. If it has no Unix socket either, this waits for a moment.
        """
        address = next((each for each in self._addresses if each.path or not self._is_encrypted), None)
        if address is None:
            return await asyncio.sleep(_INSTEAD_OF_PROBE_SECONDS)
        options = Route.to(address, {}).options
        async with grpc.aio.insecure_channel(address.target, options=options) as channel:
            check: Any = channel.unary_unary(_HEALTH_CHECK)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await check(b"", timeout=_PROBE_SECONDS)
        return None

    async def stop(self, grace: float, told: Callable[[], None]) -> None:
        """Closes the ports, lets calls under way go on for `grace` seconds, then ends them with UNAVAILABLE.

        `told` is called when the ports are closed and clients have been told so.
        """
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._current.remove_files()
        stopping = [asyncio.create_task(each.stop(grace)) for each in {self._current, *self._abandoned}]
        # The tasks close the ports and tell clients so first, before they wait.
        await asyncio.sleep(0)
        told()
        await asyncio.gather(*stopping, *self._abandoned.values())

    async def _supervise(self) -> None:
        while True:
            if not self._has_failed:
                failure = await self._current.failure()
                if failure is None:
                    return
                self._has_failed = True
                self._report(failure)
                self._abandon(self._current)
            self._current = await self._replacement()
            await self._current.start()
            self._has_failed = False

    def _report(self, failure: Exception) -> None:
        """Logs a failure, but only once in a while, because a client can cause it again and again."""
        now = time.monotonic()
        if now - self._last_report < _QUIET_SECONDS:
            return
        self._last_report = now
        traceback = None if isinstance(failure, UnicodeDecodeError) else failure
        _log.warning("gRPC's server ended: %s; another one has replaced it", failure, exc_info=traceback)

    def _abandon(self, endpoint: Endpoint) -> None:
        endpoint.remove_files()
        task = asyncio.create_task(endpoint.stop(_FOR_EVER_SECONDS))
        self._abandoned[endpoint] = task
        task.add_done_callback(lambda _: self._abandoned.pop(endpoint))

    async def _replacement(self) -> Endpoint:
        """Returns an endpoint bound to the same addresses as soon as they are free."""
        while True:
            endpoint = self._make()
            try:
                endpoint.bind(self._addresses)
            except OSError as error:
                _log.debug("%s; trying again", error)
                await endpoint.stop(0)
                endpoint.remove_files()
                await asyncio.sleep(_BIND_PAUSE_SECONDS)
            else:
                return endpoint
