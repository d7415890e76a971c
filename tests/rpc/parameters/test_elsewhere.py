"""ParameterService of servers that do not have the parameters: aggregators, and other servers of a cluster."""

import grpc
import pytest
from google.protobuf import message_factory

from tests.cluster.servers import name_at, running_cluster
from tests.rpc.parameters.requests import Fork, create, push, ref
from tests.servers.raw_calls import SERVICES, RawCalls
from tests.trees.servers import running_tree

METHODS = SERVICES["ParameterService"].methods_by_name


def test_an_aggregator_names_the_server_that_has_parameters() -> None:
    with running_tree(1) as (top, near), RawCalls(near.address) as calls:
        for method, descriptor in METHODS.items():
            failure = calls.fail(method, message_factory.GetMessageClass(descriptor.input_type)())
            assert failure.code is grpc.StatusCode.UNIMPLEMENTED, method
            assert failure.message == (
                "this server is an aggregator, which has no parameters and forwards no updates: connect to the server "
                f"upstream, {top.address}"
            )


def test_parameters_are_on_the_home_of_their_name() -> None:
    here, there = name_at(0, 2), name_at(1, 2)
    with running_cluster(2) as servers, RawCalls(servers[0].address) as calls:
        info = calls.call("CreateParameters", create(here)).info
        assert info.parameters.member == "train 0/2"
        requests = {
            "CreateParameters": create(there),
            "Push": push(there),
            "ForkParameters": Fork(parameters=ref(here), fork=ref(there)),
        }
        for method, request in requests.items():
            failure = calls.fail(method, request)
            field = "fork.name" if method == "ForkParameters" else "parameters.name"
            assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), method
            assert f"parameters 'default/{there}' belong to server 1 of cluster 'train'" in failure.message
        with RawCalls(servers[1].address) as home:
            assert home.call("CreateParameters", create(there)).created


@pytest.mark.parametrize("member", ["train 0/2", ""])
def test_a_call_may_name_the_server(member: str) -> None:
    name = name_at(0, 2)
    with running_cluster(2) as servers, RawCalls(servers[0].address) as calls:
        request = create(name)
        request.parameters.member = member
        assert calls.call("CreateParameters", request).created
