"""ParameterService of servers that do not have the parameters: aggregators, and other servers of a cluster."""

import grpc
import pytest
from google.protobuf import message_factory

from tests.cluster.servers import name_at, running_cluster
from tests.rpc.parameters.requests import Fork, create, push, ref
from tests.servers.raw_calls import SERVICES, RawCalls
from tests.trees.servers import running_tree

METHODS = SERVICES["ParameterService"].methods_by_name
OF_SHARDS = ("StageUpdate", "CountUpdates", "ForgetUpdates")
"""The methods that clients of several servers call on each of them. An aggregator is the only server of its clients."""


def test_an_aggregator_refuses_what_its_server_refuses() -> None:
    with running_tree(1) as (top, near), RawCalls(near.address) as calls, RawCalls(top.address) as there:
        for method, descriptor in METHODS.items():
            kind = message_factory.GetMessageClass(descriptor.input_type)
            if method == "ListParameters":
                assert calls.call(method, kind()) == there.call(method, kind())
                continue
            requests = [kind(), kind(parameters=ref("x" * 10_000))]
            if method in OF_SHARDS:
                assert "this server is an aggregator" in calls.fail(method, kind(parameters=ref("missing"))).message
                continue
            if method == "DeleteParameters":
                assert not calls.call(method, kind(parameters=ref("missing"))).deleted
            else:
                requests.append(kind(parameters=ref("missing")))
            for request in requests:
                assert calls.fail(method, request) == there.fail(method, request), method


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
