"""The asyncio client, its accumulators and its parameters."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TypeVar

from gradserve.aio.batch_norm_layer import BatchNormLayer
from gradserve.aio.raw_ops import RawOps
from gradserve.calls.accumulators.models import GradientAccumulatorCalls
from gradserve.calls.accumulators.operations import (
    AccumulatorCalls,
    ConditionalAccumulatorCalls,
    OneTensorAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import DEFAULT_TIMEOUT_SECONDS
from gradserve.calls.parameters.operations import ParametersCalls
from gradserve.discovery import servers_to_connect
from gradserve.face import AsyncFace, BriefErrors, awaiting, awaiting_another, awaiting_making
from gradserve.interceptors import Interceptor
from gradserve.local_aggregator import aggregator_for
from gradserve.public_names import shown
from gradserve.results import AccumulatorHandle
from gradserve.tracing import Tracing
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.driving import AsyncTransport
from gradserve.transport.settings import ConnectionSettings, TransportName, wanted_server
from gradserve_protocol.errors import ForkedClientError
from gradserve_protocol.tls import TLS

KindT = TypeVar("KindT", bound=AccumulatorCalls)
OneTensorKindT = TypeVar("OneTensorKindT", bound=OneTensorAccumulatorCalls)


class Accumulator(AsyncFace[KindT]):
    """The base class of all accumulators."""

    @property
    def name(self) -> str:
        """The accumulator's name on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    num_accumulated = awaiting(AccumulatorCalls.num_accumulated)
    set_global_step = awaiting(AccumulatorCalls.set_global_step)
    info = awaiting(AccumulatorCalls.info)
    delete = awaiting(AccumulatorCalls.delete)


class _OneTensorAccumulator(Accumulator[OneTensorKindT]):
    """The base class of accumulators of one tensor."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """The accumulator's handle, for the ops of `RawOps` of this client and of others."""
        return self._calls.accumulator_ref


class ConditionalAccumulator(_OneTensorAccumulator[ConditionalAccumulatorCalls]):
    """TensorFlow's ConditionalAccumulator, served: averages dense gradients of one tensor.

    Made by `Client.conditional_accumulator`.
    """

    apply_grad = awaiting(ConditionalAccumulatorCalls.apply_grad)
    take_grad = awaiting(ConditionalAccumulatorCalls.take_grad)
    read_average = awaiting(ConditionalAccumulatorCalls.read_average)


class SparseConditionalAccumulator(_OneTensorAccumulator[SparseConditionalAccumulatorCalls]):
    """TensorFlow's SparseConditionalAccumulator, served: averages sparse gradients of one tensor.

    Made by `Client.sparse_conditional_accumulator`.
    """

    apply_grad = awaiting(SparseConditionalAccumulatorCalls.apply_grad)
    apply_indexed_slices_grad = awaiting(SparseConditionalAccumulatorCalls.apply_indexed_slices_grad)
    take_grad = awaiting(SparseConditionalAccumulatorCalls.take_grad)
    take_indexed_slices_grad = take_grad
    read_average = awaiting(SparseConditionalAccumulatorCalls.read_average)


class GradientAccumulator(Accumulator[GradientAccumulatorCalls]):
    """Averages the gradients of a whole model: several named components, applied and counted as one.

    Made by `Client.gradient_accumulator`.
    """

    apply_grad = awaiting(GradientAccumulatorCalls.apply_grad)
    take_grad = awaiting(GradientAccumulatorCalls.take_grad)
    read_average = awaiting(GradientAccumulatorCalls.read_average)
    push_pull = awaiting(GradientAccumulatorCalls.push_pull)


def connect(
    address: str | Sequence[str] | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    transport: TransportName | None = None,
    tls: TLS | None = None,
    token: str | None = None,
    tracing: "Tracing | None" = None,
    local_aggregator: int | None = None,
    interceptors: Sequence[Interceptor] = (),
) -> "Client":
    """Returns a client of the server at an address. Nothing is sent to it before the first call.

    Close it when it is no longer needed, or use it in a `with` block (`async with` for the client of `gradserve.aio`).
    Accumulators and layers without a shared name or scope live as long as the client; those with one live on the server
    until somebody deletes them.

    Args:
        address: "HOST:PORT", "HOST" for port 50051, "[IPV6]:PORT" or "unix:PATH". Several servers of a cluster: a list
            of their addresses in their order, or one text with commas between them, or "dns+srv://SERVICE": the servers
            in the SRV records of a DNS name, in the natural order of their host names. `connect` looks them up once,
            and blocks for up to 5 s (in `gradserve.aio` the event loop too). Needs the extra gradserve[dns].
            Or "gradserve+ray://NAME": the servers that `gradserve cluster up` has started on Ray; `connect` waits until
            they are up, at most for `timeout`. Needs the extra gradserve[ray].
            None: what the environment variable GRADSERVE_ADDRESS says, or "localhost:50051"; `gradserve run` sets it.
        timeout: Seconds after which a call fails with DeadlineExceededError, and the default waiting time of calls that
            wait for other workers. math.inf: no limit. In any case, a call fails with UnavailableError when the server
            is gone, or has given no sign of life for about a minute.
        transport: The way of calls. "shared_memory": the server's Unix socket, on the same machine. "bulk": a TCP
            socket beside gRPC. "grpc": gRPC alone. "auto": the fastest of these that works; if it fails, gRPC takes its
            place. None: what the environment variable GRADSERVE_TRANSPORT says, or "auto". If a way that was asked for
            is not possible, calls fail with UnavailableError. `server_info().transport` says which way is in use.
        tls: What encrypts connections over TCP: `gradserve.TLS(ca="ca.pem")` for a server with a certificate. None:
            they are not encrypted; if the address is None, too, what GRADSERVE_TLS (1: with the authorities of the
            system), GRADSERVE_TLS_CA, GRADSERVE_TLS_CLIENT_CERTIFICATE and GRADSERVE_TLS_CLIENT_KEY say. Unix sockets
            never are.
        token: The bearer token, for a server with access control; `gradserve token` makes one. None: what the
            environment variable GRADSERVE_TOKEN says, or no token.
        tracing: Whether calls have OpenTelemetry spans: True for those of the global provider of tracers, a provider
            for its own, False for none. The server's spans are children of theirs. None: what the environment variable
            GRADSERVE_TRACING says, "on" or "off", or no spans. Needs the extra gradserve[tracing].
        local_aggregator: The number of workers on this host that share an aggregator: a server on this host, which
            passes their gradients on to the address as one. The first worker starts it, which takes some seconds (in
            `gradserve.aio` the event loop waits, too), the others find it, and it ends by itself a minute after the
            last of them. They have to give the same address, `tls` and `token`, which are then for its connection.
            None: what the environment variable GRADSERVE_LOCAL_AGGREGATOR says, or no aggregator. Needs the extra
            gradserve[server].
        interceptors: What acts around the client's calls, the outermost first: objects of classes derived from
            `gradserve.Interceptor`; see docs/howto/interceptors.md.

    Raises:
        InvalidArgumentError: The address, the timeout, the transport, the token, the tracing, the number of workers or
            an interceptor is not valid, a file of `tls` cannot be used, or OpenTelemetry, dnspython, Ray or the server
            is needed and not installed.
        NotFoundError: There is no cluster of this name on Ray.
        UnavailableError: DNS or Ray does not answer, DNS knows no servers of the service, or the local aggregator does
            not start.
        DeadlineExceededError: Not all servers of a cluster on Ray were up within `timeout`.
    """
    return Client(
        address,
        timeout=timeout,
        transport=transport,
        tls=tls,
        token=token,
        tracing=tracing,
        local_aggregator=local_aggregator,
        interceptors=interceptors,
    )


class Parameters(AsyncFace[ParametersCalls]):
    """A model's parameters on the server: workers push updates, and an optimizer there makes the next version.

    Made by `Client.parameters`.
    """

    @property
    def name(self) -> str:
        """The name of the parameters on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    read = awaiting(ParametersCalls.read)
    push = awaiting(ParametersCalls.push)
    push_pull = awaiting(ParametersCalls.push_pull)
    wait = awaiting(ParametersCalls.wait)
    info = awaiting(ParametersCalls.info)
    rounds = awaiting(ParametersCalls.rounds)
    report = awaiting(ParametersCalls.report)
    evaluations = awaiting(ParametersCalls.evaluations)
    evaluate = awaiting(ParametersCalls.evaluate)
    change = awaiting(ParametersCalls.change)
    save = awaiting(ParametersCalls.save)
    load = awaiting(ParametersCalls.load)
    fork = awaiting_another(ParametersCalls.fork, lambda: Parameters)
    delete = awaiting(ParametersCalls.delete)


class Client(AsyncFace[ClientCalls]):
    """A connection to a gradserve server. Belongs to the event loop in which it is made."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        transport: TransportName | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        tracing: "Tracing | None" = None,
        local_aggregator: int | None = None,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        """Connects to a server; the function `connect` describes the arguments."""
        with BriefErrors():
            address, tls = wanted_server(address, tls, os.environ)
            settings = ConnectionSettings.wanted(timeout, transport, tls, token, tracing, os.environ, interceptors)
            places = servers_to_connect(address, timeout)
            self._aggregator = aggregator_for(address, local_aggregator, tls, token, os.environ)
            if self._aggregator is not None:
                places = servers_to_connect(self._aggregator.address, timeout)
            network = AsyncNetworkTransport(places, settings)
        names = [str(each) for each in places]
        calls = ClientCalls.of_new_client(settings.times, settings.kept_bytes, names, time.monotonic)
        self._begin(network, ",".join(names), calls)

    @classmethod
    def _over(cls, transport: AsyncTransport, address: str, calls: ClientCalls) -> Self:
        """Returns a client over a given transport: one other than gRPC's, or with other settings.

        Args:
            transport: The transport; the client owns it and closes it.
            address: The server's address, as the client shows it.
            calls: The client's calls, with an identity and time limits.
        """
        client = cls.__new__(cls)
        client._aggregator = None
        client._begin(transport, address, calls)
        return client

    def _begin(self, transport: AsyncTransport, address: str, calls: ClientCalls) -> None:
        super().__init__(transport, calls)
        self.address = address
        self.raw_ops = RawOps(transport, calls.raw_ops)
        """TensorFlow's gradient ops and accumulator ops, carried out by the server."""

    def __repr__(self) -> str:
        return shown(self, self.address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            await self.close()
        else:
            self._calls.note_on(error)
            with suppress(ForkedClientError):  # a fork leaves the block; the client is its parent's
                await self._disconnect()

    async def close(self, timeout: float | None = None) -> None:
        """Deletes what this client made without a shared name or scope, and disconnects. Can be called again.

        First waits until the gradients and updates that it has sent to shared accumulators and parameters of durability
        "round" are durable, that is, until their rounds have ended: afterwards nobody could send them again. A block
        that ends with an error does not wait.

        Waits at most 10 s for a silent server. If the client is not closed, or the server cannot be reached, the server
        deletes these things itself somewhat later (after `client_lease` of `server_info().limits`).

        Args:
            timeout: Seconds to wait until the gradients are durable. None: 10 s.

        Raises:
            NotDurableError: Rounds have not ended in time; the error says how many gradients are in them. The client is
                closed anyway.
            LostError: A restart of the server has lost what the error names; likewise.
        """
        with BriefErrors():
            try:
                await self._transport.run(self._calls.settle(timeout))
            finally:
                await self._disconnect()

    async def _disconnect(self) -> None:
        with BriefErrors():
            await self._transport.run(self._calls.end_leases())
            await self._transport.close()
            if self._aggregator is not None:
                self._aggregator.close()

    conditional_accumulator = awaiting_making(ClientCalls.conditional_accumulator, ConditionalAccumulator)
    sparse_conditional_accumulator = awaiting_making(
        ClientCalls.sparse_conditional_accumulator, SparseConditionalAccumulator
    )
    gradient_accumulator = awaiting_making(ClientCalls.gradient_accumulator, GradientAccumulator)
    parameters = awaiting_making(ClientCalls.parameters, Parameters)
    list_parameters = awaiting(ClientCalls.list_parameters)
    delete_parameters = awaiting(ClientCalls.delete_parameters)
    list_accumulators = awaiting(ClientCalls.list_accumulators)
    delete_accumulator = awaiting(ClientCalls.delete_accumulator)
    batch_norm = awaiting_making(ClientCalls.batch_norm, BatchNormLayer)
    list_batch_norm_layers = awaiting(ClientCalls.list_batch_norm_layers)
    delete_batch_norm_layer = awaiting(ClientCalls.delete_batch_norm_layer)
    run_updates = awaiting(ClientCalls.run_updates)
    empty = awaiting(ClientCalls.empty)
    put = awaiting(ClientCalls.put)
    put_all = awaiting(ClientCalls.put_all)
    get = awaiting(ClientCalls.get)
    get_all = awaiting(ClientCalls.get_all)
    delete = awaiting(ClientCalls.delete)
    list_tensors = awaiting(ClientCalls.list_tensors)
    new_request_id = awaiting(ClientCalls.new_request_id)
    server_info = awaiting(ClientCalls.server_info)
    server_status = awaiting(ClientCalls.server_status)
    server_log = awaiting(ClientCalls.server_log)
