"""The connection of an aggregator to the server upstream, or to the servers of a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import DEFAULT_TIMEOUT_SECONDS, Operation, Reply, Unary, Whole
from gradserve.calls.server import Cluster
from gradserve.calls.tensors import call_with_arrays
from gradserve.discovery import servers_to_connect
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.arrays import Array
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.tls import TLS
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average
from gradserve_server.rpc.upstream.messages import receive_average, served

T = TypeVar("T")

_YES = ("1", "true", "t", "yes", "y", "on")
_SERVICE = "AccumulatorService"


class UpstreamLink:
    """Makes calls on accumulators upstream, with the transports, retries, TLS and token of any other client.

    Opened and used on one event loop.

    Attributes:
        address: The address, as it was given.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._settings: ConnectionSettings | None = None
        self._transport: AsyncNetworkTransport | None = None
        self._cluster = Cluster()

    async def open(self) -> None:
        """Looks the servers up. Nothing is sent to them yet.

        Raises:
            ServiceError: The address or a setting of clients in the environment is not valid, or there are no servers.
        """
        try:
            settings = ConnectionSettings.wanted(
                DEFAULT_TIMEOUT_SECONDS, None, _tls(os.environ), None, None, os.environ
            )
            places = await asyncio.to_thread(servers_to_connect, self.address, DEFAULT_TIMEOUT_SECONDS)
            self._transport = AsyncNetworkTransport(places, settings)
        except GradserveError as error:
            raise served(error) from error
        self._cluster = Cluster([str(each) for each in places])

    async def close(self) -> None:
        """Disconnects."""
        if self._transport is not None:
            await self._transport.close()

    @property
    def cluster(self) -> Cluster:
        """The servers upstream, once it is open."""
        return self._cluster

    async def call(self, method: str, request: Any, *, target: int | None = None) -> Any:
        """Makes a call without tensors; returns the response.

        Args:
            method: The method of AccumulatorService.
            request: The request, on the accumulator that it names unless there is a target.
            target: The index of the server.

        Raises:
            ServiceError: What the server says, or that it cannot be reached.
        """

        def operation() -> Operation[Any]:
            if target is None:
                yield from self._name_member(request.accumulator)
            return (yield Unary(_SERVICE, method, request))

        return await self._run_at(self._home_of(request.accumulator) if target is None else target, operation())

    async def send(
        self,
        method: str,
        ref: accumulator_pb2.AccumulatorRef,
        arrays: Sequence[Array],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        wait: float = 0.0,
    ) -> tuple[Any, Average | None]:
        """Makes a call with tensors in its request; returns the response, and its average if it has one.

        Args:
            method: The method of AccumulatorService.
            ref: The accumulator.
            arrays: The tensors.
            request: Returns the request for the messages of the tensors.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """

        def operation() -> Operation[tuple[Any, Average | None]]:
            yield from self._name_member(ref)
            reply = yield from call_with_arrays(
                _SERVICE, method, arrays, request, wait=wait, released=True, in_place=True
            )
            return reply.message, (yield from receive_average(reply))

        return await self._run_at(self._home_of(ref), operation())

    async def wait(self, method: str, request: Any, wait: float) -> tuple[Any, Average]:
        """Makes a call that waits for an average; returns the response and the average.

        Args:
            method: The method of AccumulatorService.
            request: The request.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """

        def operation() -> Operation[tuple[Any, Average | None]]:
            yield from self._name_member(request.accumulator)
            reply: Reply = yield Whole(Unary(_SERVICE, method, request, wait, in_place=True))
            return reply.message, (yield from receive_average(reply))

        message, average = await self._run_at(self._home_of(request.accumulator), operation())
        assert average is not None, "the protos say so"
        return message, average

    def _home_of(self, ref: accumulator_pb2.AccumulatorRef) -> int:
        return self._cluster.home_of(ref.container, ref.name)

    def _name_member(self, ref: accumulator_pb2.AccumulatorRef) -> Operation[None]:
        """Says in a request for which member of a cluster it is, if there are several."""
        if self._cluster.size > 1 and not ref.member:
            ref.member = yield from self._cluster.member(self._home_of(ref))

    async def _run_at(self, target: int, operation: Operation[T]) -> T:
        return await self.run(at_target(target, operation) if target else operation)

    async def run(self, operation: Operation[T]) -> T:
        """Carries out an operation of a client of these servers.

        Raises:
            ServiceError: See `call`.
        """
        assert self._transport is not None, "it is open"
        try:
            return await self._transport.run(operation)
        except GradserveError as error:
            raise served(error) from error


def _tls(environment: Mapping[str, str]) -> TLS | None:
    """Returns what the commands take from the environment, too."""
    files = [environment.get(f"GRADSERVE_TLS_{name}") or None for name in ("CA", "CLIENT_CERTIFICATE", "CLIENT_KEY")]
    is_wanted = environment.get("GRADSERVE_TLS", "").strip().lower() in _YES
    return TLS(*files) if is_wanted or any(files) else None
