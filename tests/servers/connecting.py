"""Clients with other settings than those that users can give, and what is inside them, which is private to users."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gradserve
import gradserve.aio
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import TimeLimits
from gradserve.calls.retries import RetryPolicy
from gradserve.transport.aio.transport import AsyncNetworkTransport
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_protocol.address import Address

NO_RETRIES = RetryPolicy(pauses=(), restart_patience=0)
"""Clients do not try again by themselves: every fault reaches the code that calls."""


@contextmanager
def no_server() -> Iterator[str]:
    """Yields the address of a port at which nobody listens, and nobody can until the end of the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def client_over(transport: Any, address: str, calls: ClientCalls) -> gradserve.Client:
    """Returns a client over a transport of the test's own."""
    return gradserve.Client._over(transport, address, calls)


def aio_client_over(transport: Any, address: str, calls: ClientCalls) -> gradserve.aio.Client:
    return gradserve.aio.Client._over(transport, address, calls)


def transport_of(face: Any) -> Any:
    """Returns the transport of a client, accumulator or layer."""
    return face._transport


def carrier_of(client: gradserve.Client) -> Any:
    """Returns the carrier of a client's calls over sockets to its first server."""
    return transport_of(client)._servers[0]._sockets


def connect_with(address: str, settings: ConnectionSettings) -> gradserve.Client:
    transport = NetworkTransport((Address.to_connect(address),), settings)
    return client_over(transport, address, calls_of(settings))


def connect_with_aio(address: str, settings: ConnectionSettings) -> gradserve.aio.Client:
    transport = AsyncNetworkTransport((Address.to_connect(address),), settings)
    return aio_client_over(transport, address, calls_of(settings))


def calls_of(settings: ConnectionSettings) -> ClientCalls:
    return ClientCalls.of_new_client(settings.times)


def without_retries(timeout: float, transport: Transport = Transport.AUTO) -> ConnectionSettings:
    return ConnectionSettings(TimeLimits(timeout), NO_RETRIES, transport=transport)


def change_times(face: Any, times: TimeLimits) -> None:
    """Changes how long the later calls of a client, accumulator or layer may take, and those of all of its client."""
    transport = transport_of(face)
    transport._settings = replace(transport._settings, times=times)
