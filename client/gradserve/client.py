"""The blocking client. `gradserve.aio` has the asyncio client."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Self
from weakref import WeakValueDictionary

from gradserve.accumulators import (
    ConditionalAccumulator,
    GradientAccumulator,
    SparseConditionalAccumulator,
)
from gradserve.batch_norm_layer import BatchNormLayer
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import DEFAULT_TIMEOUT_SECONDS
from gradserve.discovery import servers_to_connect
from gradserve.face import BlockingFace, BriefErrors, blocking, blocking_making
from gradserve.interceptors import Interceptor
from gradserve.local_aggregator import aggregator_for
from gradserve.parameters import Parameters
from gradserve.public_names import shown
from gradserve.raw_ops import RawOps
from gradserve.tracing import Tracing
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.driving import BlockingTransport
from gradserve.transport.settings import ConnectionSettings, TransportName, wanted_server
from gradserve_protocol.errors import ForkedClientError, InvalidArgumentError
from gradserve_protocol.tls import TLS


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


_clients: "WeakValueDictionary[str, Client]" = WeakValueDictionary()
_numbers = count()


def name_of(client: "Client") -> str:
    """Returns the name of a client in this process, for frameworks whose operators take no other objects."""
    return client._name


def client_named(name: str) -> "Client":
    """Returns the client of a name.

    Raises:
        InvalidArgumentError: It does not exist any more.
    """
    client = _clients.get(name)
    if client is None:
        raise InvalidArgumentError(
            "expected a client that is still in use for client, got one that was dropped", field="client"
        )
    return client


class Client(BlockingFace[ClientCalls]):
    """A connection to a gradserve server. Safe to use from several threads, but not after a fork."""

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
            network = NetworkTransport(places, settings)
        names = [str(each) for each in places]
        calls = ClientCalls.of_new_client(settings.times, settings.kept_bytes, names, time.monotonic)
        self._begin(network, ",".join(names), calls)

    @classmethod
    def _over(cls, transport: BlockingTransport, address: str, calls: ClientCalls) -> Self:
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

    def _begin(self, transport: BlockingTransport, address: str, calls: ClientCalls) -> None:
        super().__init__(transport, calls)
        self.address = address
        self._name = str(next(_numbers))
        _clients[self._name] = self
        self.raw_ops = RawOps(transport, calls.raw_ops)
        """TensorFlow's gradient ops and accumulator ops, carried out by the server."""

    def __repr__(self) -> str:
        return shown(self, self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._calls.note_on(error)
            with suppress(ForkedClientError):  # a fork leaves the block; the client is its parent's
                self._disconnect()

    def close(self, timeout: float | None = None) -> None:
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
                self._transport.run(self._calls.settle(timeout))
            finally:
                self._disconnect()

    def _disconnect(self) -> None:
        with BriefErrors():
            self._transport.run(self._calls.end_leases())
            self._transport.close()
            if self._aggregator is not None:
                self._aggregator.close()

    conditional_accumulator = blocking_making(ClientCalls.conditional_accumulator, ConditionalAccumulator)
    sparse_conditional_accumulator = blocking_making(
        ClientCalls.sparse_conditional_accumulator, SparseConditionalAccumulator
    )
    gradient_accumulator = blocking_making(ClientCalls.gradient_accumulator, GradientAccumulator)
    parameters = blocking_making(ClientCalls.parameters, Parameters)
    list_parameters = blocking(ClientCalls.list_parameters)
    delete_parameters = blocking(ClientCalls.delete_parameters)
    list_accumulators = blocking(ClientCalls.list_accumulators)
    delete_accumulator = blocking(ClientCalls.delete_accumulator)
    batch_norm = blocking_making(ClientCalls.batch_norm, BatchNormLayer)
    list_batch_norm_layers = blocking(ClientCalls.list_batch_norm_layers)
    delete_batch_norm_layer = blocking(ClientCalls.delete_batch_norm_layer)
    run_updates = blocking(ClientCalls.run_updates)
    empty = blocking(ClientCalls.empty)
    put = blocking(ClientCalls.put)
    put_all = blocking(ClientCalls.put_all)
    get = blocking(ClientCalls.get)
    get_all = blocking(ClientCalls.get_all)
    delete = blocking(ClientCalls.delete)
    list_tensors = blocking(ClientCalls.list_tensors)
    new_request_id = blocking(ClientCalls.new_request_id)
    server_info = blocking(ClientCalls.server_info)
    server_status = blocking(ClientCalls.server_status)
    server_log = blocking(ClientCalls.server_log)
