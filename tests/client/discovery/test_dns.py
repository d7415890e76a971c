"""dns+srv://SERVICE: clients find the servers of a cluster by the SRV records of its name."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.discovery import dns as discovery
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_testing import LocalServer
from tests.client.discovery.name_server import NameServer, name_server
from tests.cluster.servers import name_at
from tests.servers.runtime import NOT_WARMED_UP

GRADIENT = np.arange(3, dtype=np.float32)
NAMESPACE = "training.svc.cluster.local"
NAME = f"_grpc._tcp.gradserve.{NAMESPACE}."


def pod(index: int, port: int = 50051, priority: int = 0) -> str:
    return f"{priority} 10 {port} gradserve-{index}.gradserve.{NAMESPACE}."


def host(index: int, port: int = 50051) -> str:
    return f"gradserve-{index}.gradserve.{NAMESPACE}:{port}"


@pytest.fixture
def server() -> Iterator[NameServer]:
    with name_server({NAME: [pod(index) for index in (10, 2, 0, 1)]}) as server:
        yield server


def test_targets_are_in_the_natural_order_of_their_names(server: NameServer) -> None:
    found = discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver())
    assert found == [host(0), host(1), host(2), host(10)]


@pytest.mark.parametrize(
    "service",
    [
        "gradserve",
        "gradserve.training",
        "gradserve.training.svc",
        f"gradserve.{NAMESPACE}",
        f"gradserve.{NAMESPACE}.",
        "_grpc._tcp.gradserve",
        "_GRPC._tcp.Gradserve.training",
    ],
)
def test_names_are_completed_as_in_a_pod(service: str) -> None:
    with name_server({NAME: [pod(0)], NAME.replace("grpc", "GRPC").replace("grads", "Grads"): [pod(0)]}) as server:
        resolver = server.resolver(NAMESPACE, "svc.cluster.local", "cluster.local")
        assert discovery.look_up(service, resolver) == [host(0)]


def test_other_names_of_ports() -> None:
    with name_server({"_training._tcp.example.org.": ["0 0 7 a.example.org."]}) as server:
        assert discovery.look_up("_training._tcp.example.org", server.resolver()) == ["a.example.org:7"]


def test_a_cluster_that_is_too_large_for_udp() -> None:
    """Its records come over TCP."""
    with name_server({NAME: [pod(index) for index in reversed(range(100))]}) as server:
        assert discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver()) == [host(index) for index in range(100)]
        assert len(server.asked) == 2


def test_records_that_differ_in_their_weights_alone_are_one_server() -> None:
    with name_server({NAME: [pod(1), pod(0), pod(0).replace(" 10 ", " 20 ")]}) as server:
        assert discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver()) == [host(0), host(1)]


def test_ports_are_those_of_the_records() -> None:
    """Also of several servers on one host, which are in the order of their ports."""
    with name_server({NAME: [pod(1, 7), pod(0, 10000), pod(0, 9), pod(2)]}) as server:
        found = discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver())
    assert found == [host(0, 9), host(0, 10000), host(1, 7), host(2)]


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        (
            {NAME: [pod(0), pod(1, priority=20)]},
            gradserve.InvalidArgumentError,
            "the SRV records have the priorities 0, 20: servers of a cluster cannot replace each other, so all have to "
            "have the same priority",
        ),
        ({NAME: []}, gradserve.UnavailableError, f"{NAME[:-1]} has no SRV records in DNS"),
        ({}, gradserve.UnavailableError, f"there is no such name in DNS; asked for {NAME[:-1]}"),
        ({NAME: ["0 0 0 ."]}, gradserve.UnavailableError, "its SRV record says that no server has the service"),
    ],
    ids=["priorities", "no records", "no such name", "no service"],
)
def test_what_cannot_be_connected_to(records: Any, error: type[Exception], message: str) -> None:
    with name_server(records) as server, pytest.raises(error) as raised:
        discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver())
    assert str(raised.value).rpartition(" [")[0] == f"dns+srv://gradserve.{NAMESPACE}: {message}"


def test_equal_priorities_other_than_0() -> None:
    with name_server({NAME: [pod(0, priority=3), pod(1, priority=3)]}) as server:
        assert discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver()) == [host(0), host(1)]


def test_all_names_that_were_tried_are_in_the_error(server: NameServer) -> None:
    with pytest.raises(gradserve.UnavailableError) as raised:
        discovery.look_up("nobody", server.resolver(NAMESPACE))
    assert str(raised.value) == (
        f"dns+srv://nobody: there is no such name in DNS; asked for _grpc._tcp.nobody.{NAMESPACE}, _grpc._tcp.nobody "
        "[GS_DNS]"
    )


def test_a_silent_name_server(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.silent = True
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.2)
    with pytest.raises(gradserve.UnavailableError, match=r"no name server has answered within 0\.2 s"):
        discovery.look_up("gradserve", server.resolver(NAMESPACE))
    assert len(server.asked) == 1


def test_a_failing_name_server(server: NameServer) -> None:
    server.failing = True
    with pytest.raises(gradserve.UnavailableError, match=r"the lookup in DNS has failed: .*SERVFAIL"):
        discovery.look_up(f"gradserve.{NAMESPACE}", server.resolver())


@pytest.mark.parametrize(
    "service", ["", ".", "gradserve:50051", "a..b", "a b", "a/b", "x" * 64, "user@host", "münchen", "a,b:1", "[::1]"]
)
def test_what_is_no_service(service: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        gradserve.connect(f"dns+srv://{service}")
    assert str(raised.value).startswith("expected dns+srv://SERVICE with the name of a service in DNS, got 'dns+srv://")
    assert raised.value.field == "address"


@pytest.mark.parametrize("given", [["dns+srv://gradserve"], ["localhost:1", "DNS+SRV://gradserve"]])
def test_a_service_stands_alone(given: list[str]) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="stands for all servers of a cluster: give it alone"):
        gradserve.connect(given)


def test_without_dnspython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    with pytest.raises(gradserve.InvalidArgumentError, match=r"pip install '\.\[dns\]'"):
        gradserve.connect("dns+srv://gradserve")


def test_a_lookup_comes_after_everything_else_was_checked(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "system_resolver", server.resolver)
    for face in (gradserve, gradserve.aio):
        with pytest.raises(gradserve.InvalidArgumentError, match="timeout"):
            face.connect(f"dns+srv://gradserve.{NAMESPACE}", timeout=-1)
    assert not server.asked


def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both faces connect to all servers in their order, whatever the order of the records."""
    with ExitStack() as stack:
        servers = [stack.enter_context(_member(index, last)) for index, last in enumerate((2, 10, 100))]
        ports = [each.address.rpartition(":") for each in servers]
        records = [f"0 0 {port} {address}." for address, _, port in reversed(ports)]
        names = stack.enter_context(name_server({"_grpc._tcp.train.": records}))
        monkeypatch.setattr(discovery, "system_resolver", names.resolver)
        with gradserve.connect(" DNS+SRV://train\n") as client:
            assert client.address == ",".join(each.address for each in servers)
            for home in range(3):
                net = client.gradient_accumulator({"w": GRADIENT}, name_at(home, 3))
                np.testing.assert_array_equal(net.push_pull({"w": GRADIENT}, 1, 0)["w"], GRADIENT)
            assert len(client.list_accumulators()) == 3
        asyncio.run(_connect_and_await(client.address))


async def _connect_and_await(address: str) -> None:
    async with gradserve.aio.connect("dns+srv://train") as client:
        assert client.address == address
        assert len(await client.list_accumulators()) == 3


def _member(index: int, last: int) -> LocalServer:
    """Returns a server at a loopback address of its own."""
    place = ClusterConfig(cluster="train", cluster_size=3, cluster_index=index)
    return LocalServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=place), address=f"127.0.0.{last}:0")
