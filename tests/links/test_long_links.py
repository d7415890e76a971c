"""A link that TCP knows to be long: the client notices, and large tensors travel over several sockets."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.links import packets
from benchmarks.harness.links.network import LinkNotAvailableError, capped_link
from benchmarks.harness.links.spec import LinkSpec
from gradserve.transport.settings import Transport
from gradserve.transport.sockets.connection import round_trip
from tests.links.serving import link_or_skip, serving_behind
from tests.links.test_network import devices
from tests.servers.connecting import carrier_of, connect_with, connect_with_aio, without_retries
from tests.servers.polling import PATIENCE_SECONDS

LONG = LinkSpec(200, 0.04, by_packet=True)
SETTINGS = without_retries(PATIENCE_SECONDS, Transport.BULK)
LARGE = np.random.default_rng(0).normal(size=2_000_001).astype(np.float32)


def test_a_link_answers_and_nothing_is_left() -> None:
    with link_or_skip(100, LONG.round_trip) as link:
        assert link.here in devices()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((link.there, 1), PATIENCE_SECONDS)
    assert link.here not in devices()


def test_a_machine_without_such_devices_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with link_or_skip(100):
        pass
    monkeypatch.setattr(packets, "_DEVICE", str(tmp_path / "tun"))
    missing = pytest.raises(LinkNotAvailableError, match="no TUN device: No such file or directory")
    with missing, capped_link(100, LONG.round_trip):
        pytest.fail("there is no such link")


def test_large_tensors_travel_over_several_sockets() -> None:
    with serving_behind(LONG) as address, connect_with(address, SETTINGS) as client:
        for num_sockets, array in [(1, LARGE[:1000]), (4, LARGE), (4, -LARGE)]:
            acc = client.conditional_accumulator("float32", array.shape)
            acc.apply_grad(array)
            np.testing.assert_array_equal(acc.take_grad(1), array)
            assert client.server_info().transport.num_sockets == num_sockets
        (connection,) = carrier_of(client).connections._idle
        assert round_trip(connection._socket) >= 0.9 * LONG.round_trip


async def test_large_tensors_travel_over_several_sockets_aio() -> None:
    with serving_behind(LONG) as address:
        async with connect_with_aio(address, SETTINGS) as client:
            handles = await asyncio.gather(client.put(LARGE), client.put(-LARGE))
            for handle, array in zip(handles, (LARGE, -LARGE), strict=True):
                np.testing.assert_array_equal(await client.get(handle, release=True), array)
            assert (await client.server_info()).transport.num_sockets == 4


def test_a_client_of_one_socket() -> None:
    settings = replace(SETTINGS, sockets=replace(SETTINGS.sockets, strands=0))
    with serving_behind(LONG) as address, connect_with(address, settings) as client:
        handle = client.put(LARGE)
        np.testing.assert_array_equal(client.get(handle, release=True), LARGE)
        assert client.server_info().transport.num_sockets == 1
