"""Servers and networks of the test kit."""

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

import gradserve
import gradserve_server.testing
import gradserve_testing
from gradserve.testing import FaultyProxy, ServerProcess, ServerThread
from gradserve.transport.settings import Transport
from tests.servers.connecting import connect_with, without_retries
from tests.servers.polling import PATIENCE_SECONDS, eventually


def test_settings_by_name(tmp_path: Path) -> None:
    with (
        ServerThread(max_bytes="64MiB", state_dir=tmp_path / "state", bulk_listen="off") as server,
        gradserve.connect(server.address) as client,
    ):
        assert client.server_info().limits["max_bytes"] == 64 << 20
    assert (tmp_path / "state").is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_byte": 1}, "expected settings of `gradserve serve`, got 'max_byte'; did you mean 'max_bytes'?"),
        ({"listen": ("[::]:1",)}, "expected settings of `gradserve serve`, got 'listen'"),
        ({"max_handles": 0}, "max_handles: Input should be greater than 0, got 0"),
    ],
    ids=["unknown", "address", "value"],
)
def test_settings_that_are_not_valid(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)):
        ServerThread(**settings)


def test_a_process_that_is_paused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false") as server, gradserve.connect(server.address) as client:
        assert client.server_info().version
        assert min(server.num_descriptors, server.resident_bytes, server.num_threads) > 0
        server.pause()
        eventually(lambda: psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED)
        server.resume()
        assert client.server_info().version
        server.pause()  # the end of the block lets it go on, so that it can end


def test_a_process_listens_where_nobody_else_can_come_while_it_is_down(tmp_path: Path) -> None:
    """Its ports are none of those that the system gives away."""
    given = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    listen = ("127.0.0.1:0", "localhost:0", "127.0.0.1:7", f"unix:{tmp_path}/socket")
    addresses = ServerProcess(tmp_path, listen=listen).addresses
    ports = [int(each.rpartition(":")[2]) for each in addresses[:2]]
    assert not {0, *given}.intersection(ports)
    assert len(set(ports)) == 2
    assert addresses == [f"127.0.0.1:{ports[0]}", f"localhost:{ports[1]}", *listen[2:]]
    assert ServerProcess(tmp_path, listen=listen[2:]).addresses == [*listen[2:]]


def test_a_network_that_is_cut_and_one_that_is_parted() -> None:
    with (
        ServerThread() as server,
        FaultyProxy(server.address) as network,
        connect_with(network.address, without_retries(PATIENCE_SECONDS, Transport.GRPC)) as client,
        gradserve.connect(network.address, timeout=0.2, transport="grpc") as impatient,
    ):
        assert client.server_info().version
        network.partition()
        with pytest.raises((gradserve.DeadlineExceededError, gradserve.UnavailableError)):
            impatient.server_info()
        network.heal()
        assert client.server_info().version  # on the same connection
        network.cut()
        with pytest.raises(gradserve.UnavailableError):
            eventually(client.server_info, lambda _: False)
        network.heal()
        with gradserve.connect(network.address, timeout=PATIENCE_SECONDS, transport="grpc") as newcomer:
            assert newcomer.server_info().version


def test_a_process_that_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"the server did not start: .*max-handles"),
        ServerProcess(tmp_path, "--max-handles", "0"),
    ):
        pass


def test_the_local_server_has_two_names() -> None:
    assert gradserve_server.testing.LocalServer is gradserve_testing.LocalServer
