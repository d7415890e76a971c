"""What is set of a connection is what gRPC does."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.retries import RetryPolicy
from gradserve.transport.channel import channel_options
from gradserve.transport.settings import ConnectionSettings, Keepalive, MessageSizes, Reconnecting, Transport
from tests.servers.connecting import connect_with, connect_with_aio

USUAL = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 15_000,
    "grpc.http2.ping_timeout_ms": 15_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.per_rpc_retry_buffer_size": 4 << 20,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 500,
    "grpc.min_reconnect_backoff_ms": 20_000,
    "grpc.use_local_subchannel_pool": 1,
}
SHORT_MESSAGES = ConnectionSettings(sizes=MessageSizes(longest=10_000), transport=Transport.GRPC)


def test_what_is_usual() -> None:
    assert dict(channel_options(ConnectionSettings())) == USUAL


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        (
            {"keepalive": Keepalive(interval=0.25, timeout=2)},
            {
                "grpc.keepalive_time_ms": 250,
                "grpc.keepalive_timeout_ms": 2000,
                "grpc.http2.ping_timeout_ms": 2000,
            },
        ),
        (
            {"reconnecting": Reconnecting(first_pause=1, longest_pause=2, attempt=3)},
            {
                "grpc.initial_reconnect_backoff_ms": 1000,
                "grpc.max_reconnect_backoff_ms": 2000,
                "grpc.min_reconnect_backoff_ms": 3000,
            },
        ),
        (
            {"sizes": MessageSizes(longest=10, kept=20)},
            {
                "grpc.max_receive_message_length": 10,
                "grpc.max_send_message_length": 10,
                "grpc.per_rpc_retry_buffer_size": 20,
            },
        ),
    ],
    ids=["keepalive", "reconnecting", "sizes"],
)
def test_what_is_changed(changed: dict[str, Any], options: dict[str, int]) -> None:
    assert dict(channel_options(ConnectionSettings(**changed))) == USUAL | options


def test_settings_are_values() -> None:
    assert ConnectionSettings() == ConnectionSettings()
    for each in (ConnectionSettings(), RetryPolicy(), MessageSizes()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, None)


def test_pauses_vary_by_the_jitter() -> None:
    policy = RetryPolicy(pauses=(1.0, 2.0), jitter=0.5)
    found = [list(policy.pauses_now(lambda: False)) for _ in range(50)]
    assert all(0.5 <= first <= 1.5 and 1.0 <= second <= 3.0 for first, second in found)
    assert len({first for first, _ in found}) > 1
    assert list(RetryPolicy(pauses=(1.0, 2.0), jitter=0.0).pauses_now(lambda: False)) == [1.0, 2.0]


async def test_longer_messages_are_refused(server_address: str, client: gradserve.Client, name: str) -> None:
    """By the client itself: one that it sends, and one that it receives."""
    shared = client.conditional_accumulator("float32", (10_000,), name)
    with connect_with(server_address, SHORT_MESSAGES) as blocking:
        with pytest.raises(gradserve.ResourceExhaustedError):
            blocking.conditional_accumulator("float32", (10_000,), name).apply_grad(np.ones(10_000, np.float32))
        shared.apply_grad(np.ones(10_000, np.float32))
        with pytest.raises(gradserve.ResourceExhaustedError):
            blocking.conditional_accumulator("float32", (10_000,), name).take_grad(1)
    async with connect_with_aio(server_address, SHORT_MESSAGES) as asynchronous:
        with pytest.raises(gradserve.ResourceExhaustedError):
            await (await asynchronous.conditional_accumulator("float32", (10_000,), name)).apply_grad(
                np.ones(10_000, np.float32)
            )
    shared.delete()
