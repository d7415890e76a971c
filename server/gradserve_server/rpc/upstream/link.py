"""The connection of an aggregator to the server upstream, or to the servers of a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import DEFAULT_TIMEOUT_SECONDS, Operation, Reply, Unary, Whole
from gradserve.calls.server import Cluster
from gradserve.calls.tensors import call_with_arrays
from gradserve.discovery import servers_to_connect
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.settings import ConnectionSettings, tls_in
from gradserve_protocol.arrays import Array
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.accumulators.gradient import Average
from gradserve_server.rpc.upstream.messages import Ref, receive_result, ref_of, served, service_of

T = TypeVar("T")


class UpstreamLink:
    """Makes calls on what is upstream, with the transports, retries, TLS and token of any other client.

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
            tls = tls_in(os.environ)
            settings = ConnectionSettings.wanted(DEFAULT_TIMEOUT_SECONDS, None, tls, None, None, os.environ)
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
            method: The method of AccumulatorService or ParameterService.
            request: The request, at the home of what it names unless there is a target.
            target: The index of the server.

        Raises:
            ServiceError: What the server says, or that it cannot be reached.
        """

        def operation() -> Operation[Any]:
            return (yield Unary(service_of(method), method, request))

        if target is None:
            return await self.run_at_home(ref_of(request), operation())
        return await self.run_at(target, operation())

    async def send(
        self,
        method: str,
        ref: Ref,
        arrays: Sequence[Array],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        wait: float = 0.0,
    ) -> tuple[Any, Average | None]:
        """Makes a call with tensors in its request; returns the response, and the average or version in it.

        Args:
            method: The method of AccumulatorService or ParameterService.
            ref: The name in the request.
            arrays: The tensors.
            request: Returns the request for the messages of the tensors.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """

        def operation() -> Operation[tuple[Any, Average | None]]:
            reply = yield from call_with_arrays(
                service_of(method), method, arrays, request, wait=wait, released=True, in_place=True
            )
            return reply.message, (yield from receive_result(reply))

        return await self.run_at_home(ref, operation())

    async def wait(self, method: str, request: Any, wait: float) -> tuple[Any, Average]:
        """Makes a call that waits for an average or a version; returns the response and that.

        Args:
            method: The method of AccumulatorService.
            request: The request.
            wait: Seconds that the server may wait for others; math.inf for no limit.

        Raises:
            ServiceError: See `call`.
        """

        def operation() -> Operation[tuple[Any, Average | None]]:
            reply: Reply = yield Whole(Unary(service_of(method), method, request, wait, in_place=True))
            return reply.message, (yield from receive_result(reply))

        message, average = await self.run_at_home(ref_of(request), operation())
        assert average is not None, "the protos say so"
        return message, average

    async def run_at_home(self, ref: Ref, operation: Operation[T]) -> T:
        """Carries out an operation of a client of the server that has what `ref` names.

        Args:
            ref: The name in the requests of the operation. In a cluster, it gets the member that they are for.
            operation: The operation.

        Raises:
            ServiceError: See `call`.
        """
        home = self._cluster.home_of(ref.container, ref.name)

        def named() -> Operation[T]:
            if self._cluster.size > 1 and not ref.member:
                ref.member = yield from self._cluster.member(home)
            return (yield from operation)

        return await self.run_at(home, named())

    async def run_at(self, target: int, operation: Operation[T]) -> T:
        """Carries out an operation of a client of one of the servers.

        Args:
            target: The index of the server.
            operation: The operation.

        Raises:
            ServiceError: See `call`.
        """
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
