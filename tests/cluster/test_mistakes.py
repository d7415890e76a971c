"""Clients with another list of servers, and servers that are not what the list says."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, accumulator_service_pb2_grpc
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, member, name_at, running_cluster
from tests.servers.connecting import no_server


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(2) as servers:
        yield servers


def _refusal(addresses: list[str], home: int) -> str:
    """Returns the error of a client with these servers, about an accumulator of one of them."""
    with gradserve.connect(addresses) as client, pytest.raises(gradserve.InvalidArgumentError) as refused:
        client.conditional_accumulator("float32", (), name_at(home, len(addresses)))
    assert refused.value.code == "GS_WRONG_SERVER"
    return refused.value.message


def test_another_order(servers: list[LocalServer]) -> None:
    first, second = addresses_of(servers)
    assert _refusal([second, first], 0) == (
        f"the server at {second} is server 1 of 2 in cluster 'train', and 0 of 2 in the client's list: give all "
        "servers of the cluster in their order"
    )


def test_another_number_of_servers(servers: list[LocalServer]) -> None:
    first, second = addresses_of(servers)
    assert f"{second} is server 1 of 2 in cluster 'train', and 1 of 3" in _refusal([first, second, "127.0.0.1:1"], 1)


def test_one_server_of_several(servers: list[LocalServer]) -> None:
    """The server itself refuses what belongs to another one."""
    name = name_at(1, 2)
    with gradserve.connect(servers[0].address) as client:
        with pytest.raises(gradserve.InvalidArgumentError) as refused:
            client.conditional_accumulator("float32", (), name)
        assert refused.value.message == (
            f"accumulator 'default/{name}' belongs to server 1 of cluster 'train', and this is server 0 of 2: connect "
            "to all of them, in their order"
        )
        client.conditional_accumulator("float32", (), name_at(0, 2)).delete()


def test_a_server_in_no_cluster(servers: list[LocalServer]) -> None:
    with member(None, 0, 1) as alone:
        assert _refusal([servers[0].address, alone.address], 1) == (
            f"the server at {alone.address} is in no cluster, and the client has a list of 2 servers: start it with "
            "--cluster NAME --cluster-index 1 --cluster-size 2"
        )


def test_a_server_of_another_cluster(servers: list[LocalServer]) -> None:
    with member("other", 1, 2) as stranger, gradserve.connect([servers[0].address, stranger.address]) as client:
        client.conditional_accumulator("float32", (), name_at(0, 2), idle_lease=60)
        with pytest.raises(gradserve.InvalidArgumentError) as refused:
            client.conditional_accumulator("float32", (), name_at(1, 2))
    assert refused.value.message == (
        f"the server at {stranger.address} is in cluster 'other', and {servers[0].address} in cluster 'train'"
    )


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (("other", 0, 2), "server 0 of 2 in cluster 'other'"),
        (("train", 1, 2), "server 1 of 2 in cluster 'train'"),
        (("train", 0, 3), "server 0 of 3 in cluster 'train'"),
        ((None, 0, 1), "in no cluster"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["CreateAccumulator", "GetAccumulator", "DeleteAccumulator", "TakeGradient"])
def test_a_server_refuses_calls_for_another_member(place: Any, what: str, method: str) -> None:
    """So a client learns it if another server has taken the address of one."""
    with member(*place) as server, grpc.insecure_channel(server.address) as channel:
        stub: Any = accumulator_service_pb2_grpc.AccumulatorServiceStub(channel)
        ref = accumulator_pb2.AccumulatorRef(name="net", member="train 0/2")
        with pytest.raises(grpc.RpcError) as refused:
            getattr(stub, method)(getattr(messages_pb2, f"{method}Request")(accumulator=ref))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"this server is {what}, and the call is for 'train 0/2'"


@pytest.mark.parametrize("given", [[], (), [""], ["localhost:1", "localhost:1"], ["localhost:1", 2], 3, "a:1,,b:1"])
def test_what_is_no_list_of_addresses(given: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError):
        gradserve.connect(given)


def test_a_server_that_is_not_there(servers: list[LocalServer]) -> None:
    """The others serve what is theirs."""
    with no_server() as gone, gradserve.connect([servers[0].address, gone]) as client:
        client.conditional_accumulator("float32", (), name_at(0, 2), idle_lease=60).apply_grad(1.0)
        with pytest.raises(gradserve.UnavailableError):
            client.conditional_accumulator("float32", (), name_at(1, 2))
