"""What listens: a server of gRPC's, and another one when a client has brought it down."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from gradserve.address import Address
from gradserve.transport.route import Route
from gradserve_server.rpc.listeners.ports import Ports

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_BIND_PAUSE_SECONDS = 0.02
_QUIET_SECONDS = 60.0
_FOR_EVER_SECONDS = 1e9
_PROBE_SECONDS = 5.0

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Endpoint:
    """A server of gRPC's, and its ports. Made and used on one event loop; serves once."""

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        loopbacks: Sequence[str],
    ) -> None:
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._ports = Ports(self._server, loopbacks)
        self._has_started = False

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports that were picked for port 0, and whole paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        return [self._ports.bind(address) for address in addresses]

    async def start(self) -> None:
        """Starts serving."""
        self._has_started = True
        await self._server.start()

    async def failure(self) -> Exception | None:
        """Waits until it serves no more; returns why, None when it was told to stop."""
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
            await self.start()  # only then does gRPC let go of the ports that it has bound
        try:
            await self._server.stop(grace)
        except UnicodeDecodeError:
            # The last call to arrive was one that brings gRPC's server down; now that it is down, it can stop.
            await self._server.stop(grace)


class LastingEndpoint:
    """Serves until it is told to stop, whatever clients send.

    A call of a method whose name is not UTF-8 ends the loop in which gRPC's server for asyncio takes calls. Calls under
    way go on then, over the connections they came by; for new ones there is another server of gRPC's on the same
    addresses, a moment later. Clients find their connection closed, and open another one.
    """

    def __init__(self, make: Callable[[], Endpoint]) -> None:
        """Takes what makes an endpoint that is not bound yet."""
        self._make = make
        self._current = make()
        self._addresses: list[Address] = []
        self._supervision: asyncio.Task[None] | None = None
        self._abandoned: dict[Endpoint, asyncio.Task[None]] = {}
        self._last_report = float("-inf")

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; see `Endpoint.bind`."""
        self._addresses = self._current.bind(addresses)
        return self._addresses

    async def start(self) -> None:
        """Starts serving."""
        await self._current.start()
        self._supervision = asyncio.create_task(self._supervise())

    async def probe(self) -> None:
        """Asks itself for its health, as a client does, and waits for the answer, whatever it is."""
        options = Route.to(self._addresses[0], {}).options
        async with grpc.aio.insecure_channel(self._addresses[0].target, options=options) as channel:
            check: Any = channel.unary_unary(_HEALTH_CHECK)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await check(b"", timeout=_PROBE_SECONDS)

    async def stop(self, grace: float, told: Callable[[], None]) -> None:
        """Closes the ports, lets calls under way go on for `grace` seconds, then ends them with UNAVAILABLE.

        `told` is called when the ports are closed and clients have been told so.
        """
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._current.remove_files()
        stopping = [asyncio.create_task(each.stop(grace)) for each in {self._current, *self._abandoned}]
        # The first thing they do, without waiting, is to close the ports and to tell clients so.
        await asyncio.sleep(0)
        told()
        await asyncio.gather(*stopping, *self._abandoned.values())

    async def _supervise(self) -> None:
        while (failure := await self._current.failure()) is not None:
            self._report(failure)
            self._abandon(self._current)
            self._current = await self._replacement()
            await self._current.start()

    def _report(self, failure: Exception) -> None:
        """Says so in the log, but once in a while: a client may make it happen again and again."""
        now = time.monotonic()
        if now - self._last_report < _QUIET_SECONDS:
            return
        self._last_report = now
        traceback = None if isinstance(failure, UnicodeDecodeError) else failure
        _log.warning("gRPC's server ended: %s; another one serves on", failure, exc_info=traceback)

    def _abandon(self, endpoint: Endpoint) -> None:
        endpoint.remove_files()
        task = asyncio.create_task(endpoint.stop(_FOR_EVER_SECONDS))
        self._abandoned[endpoint] = task
        task.add_done_callback(lambda _: self._abandoned.pop(endpoint))

    async def _replacement(self) -> Endpoint:
        """Returns an endpoint that is bound to the same addresses, as soon as they are free."""
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
