"""Parameters of a client of several servers are on one of them, by their name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Exchange, TimeLimits, Unary
from gradserve.calls.identity import RequestIds
from gradserve.calls.server import Cluster
from gradserve_protocol.v1 import server_messages_pb2
from tests.client.fake_transport import FakeTransport
from tests.client.parameters.fake_server import FakeParameterServer
from tests.servers.connecting import client_over

W = np.ones((2, 3), np.float32)


@pytest.fixture
def servers() -> list[FakeParameterServer]:
    return [FakeParameterServer() for _ in range(2)]


@pytest.fixture
def client(servers: list[FakeParameterServer]) -> Iterator[gradserve.Client]:
    def answer(exchange: Exchange) -> Any:
        target: int = getattr(exchange, "target", 0)
        if isinstance(exchange, Unary) and exchange.method == "GetServerInfo":
            member = server_messages_pb2.ClusterMember(cluster="train", index=target, size=2)
            return server_messages_pb2.GetServerInfoResponse(member=member)
        return servers[target].answer(exchange)

    calls = ClientCalls(RequestIds("me"), TimeLimits(), cluster=Cluster(["a:1", "b:1"]))
    with client_over(FakeTransport(answer), "a:1,b:1", calls) as connected:
        yield connected


def names_of(home: int) -> Iterator[str]:
    cluster = Cluster(["a:1", "b:1"])
    return (name for name in (f"p{number}" for number in range(100)) if cluster.home_of("", name) == home)


@pytest.mark.parametrize("home", [0, 1])
def test_all_calls_reach_the_home(
    servers: list[FakeParameterServer], client: gradserve.Client, home: int, tmp_path: Any
) -> None:
    names = names_of(home)
    parameters = client.parameters({"w": W}, shared_name=next(names))
    parameters.push({"w": W}, 0)
    parameters.push_pull({"w": W}, parameters.read())
    parameters.wait(2)
    parameters.change(num_required=1)
    parameters.save(tmp_path / "saved")
    parameters.load(tmp_path / "saved")
    assert parameters.rounds() == []
    fork = parameters.fork(shared_name=next(names))
    fork.push({"w": W}, 3)
    assert {each.name for each in client.list_parameters()} == {parameters.name, fork.name}
    assert {name for name, _ in servers[1 - home].requests} == {"ListParameters"}
    assert servers[home].of("CreateParameters")[0].parameters.member == f"train {home}/2"
    assert client.delete_parameters(fork.name)
    assert parameters.delete()


def test_a_fork_stays_on_its_server(client: gradserve.Client) -> None:
    parameters = client.parameters({"w": W}, shared_name=next(names_of(0)))
    with pytest.raises(gradserve.InvalidArgumentError, match="home is server 1: choose another one") as raised:
        parameters.fork(shared_name=next(names_of(1)))
    assert raised.value.field == "shared_name"


def test_tensors_of_server_0_are_not_on_others(client: gradserve.Client) -> None:
    name = next(names_of(1))
    handle = gradserve.TensorHandle("stored", np.dtype(np.float32), (2, 3))
    with pytest.raises(gradserve.InvalidArgumentError, match="tensors are on server 0") as raised:
        client.parameters({"w": handle}, shared_name=name)
    assert raised.value.field == "values"
    parameters = client.parameters({"w": W}, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError, match="tensors are on server 0") as raised:
        parameters.push({"w": handle}, 0)
    assert raised.value.field == "update"
