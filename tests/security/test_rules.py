"""Every method of every service has its rule; who may call what, over gRPC and on a socket."""

from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from gradserve_protocol.v1 import accumulator_messages_pb2, batch_norm_layer_messages_pb2, parameters_messages_pb2
from gradserve_server.errors import PermissionDeniedError
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.interceptors import AccessChecks, FairCalls
from gradserve_server.security.access import RULES
from gradserve_server.security.identity import ShareRules
from gradserve_testing import LocalServer
from tests.rpc.parameters.requests import create
from tests.security.serving import TOKENS
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import METHODS, RawCalls

CHIEFS = {
    "CreateAccumulator",
    "DeleteAccumulator",
    "SetGlobalStep",
    "TakeGradient",
    "CreateBatchNormLayer",
    "DeleteBatchNormLayer",
    "RunBatchNormUpdates",
    "SetBatchNormVariables",
    "ChangeParameters",
    "CreateParameters",
    "DeleteParameters",
    "ForkParameters",
}
"""The methods that workers may not call."""
ADMINS = {"GetLog"}
"""The methods for admins of all containers alone."""

REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def request_of(method: MethodDescriptor) -> Any:
    """Returns a request about something in the container "team" that does not exist."""
    request: Any = message_factory.GetMessageClass(method.input_type)()
    for field in ("accumulator", "layer", "parameters", "fork"):
        if field in method.input_type.fields_by_name:
            getattr(request, field).container, getattr(request, field).name = "team", "nothing"
    if "container" in method.input_type.fields_by_name:
        request.container = "team"
    if "client_id" in method.input_type.fields_by_name:
        request.client_id = "somebody"
    if isinstance(request, accumulator_messages_pb2.CreateAccumulatorRequest):
        request.spec.components.add(dtype=1)
    if isinstance(request, parameters_messages_pb2.CreateParametersRequest):
        request.MergeFrom(create("nothing"))
    return request


def has_container(method: MethodDescriptor) -> bool:
    return bool({"accumulator", "layer", "parameters", "container"} & set(method.input_type.fields_by_name))


def expected(name: str, method: MethodDescriptor) -> str:
    """Returns what becomes of a call of an identity: "served" or why not."""
    if name == "":
        return "UNAUTHENTICATED"
    is_served = {
        "idle": False,
        "worker": method.name not in CHIEFS | ADMINS,
        "chief": method.name not in ADMINS,
        "visitor": not has_container(method) and method.name not in ADMINS,
        "admin": True,
    }[name]
    return "served" if is_served else "PERMISSION_DENIED"


WHO = ("", "idle", "worker", "chief", "visitor", "admin")


@pytest.mark.parametrize("name", WHO)
def test_over_grpc_each_method_is_for_those_with_its_role(guarded: LocalServer, name: str) -> None:
    with RawCalls(guarded.address, TOKENS.get(name, "")) as calls:
        for method in METHODS.values():
            assert outcome(calls, method) == expected(name, method), method.full_name


@pytest.mark.parametrize("name", ["worker", "chief", "visitor", "admin"])
@pytest.mark.parametrize("way", ["over_tcp", "over_unix"])
def test_on_a_socket_each_method_is_for_those_with_its_role(guarded: LocalServer, name: str, way: str) -> None:
    ticket = issue_ticket(guarded.address, token=TOKENS[name])
    with getattr(FrameClient, way)(ticket) as socket:
        assert socket.hello(ticket.ticket).header.code == 0
        for method in METHODS.values():
            if on_sockets(method):
                socket.call(f"{method.containing_service.name}.{method.name}", request_of(method))
                code = socket.receive().header.code
                found = next((each.name for each in REFUSALS if each.value[0] == code), "served")
                assert found == expected(name, method), method.full_name


def outcome(calls: RawCalls, method: MethodDescriptor) -> str:
    try:
        calls.call(method.name, request_of(method))
    except grpc.RpcError as error:
        code = error.code()
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        if code in REFUSALS:
            return str(code.name)
    return "served"


def on_sockets(method: MethodDescriptor) -> bool:
    is_stream = method.client_streaming or method.server_streaming
    return not is_stream and method.name not in ("IssueTicket", "HoldClientLease")


@pytest.mark.parametrize(
    "token",
    ["gradserve_guessed", "x" * 4000, TOKENS["admin"][:-1], TOKENS["admin"] + "x"],
    ids=["guessed", "long", "cut off", "longer"],
)
def test_an_unknown_token_is_no_identity(guarded: LocalServer, token: str) -> None:
    with RawCalls(guarded.address, token) as calls:
        failure = calls.fail("GetServerInfo", request_of(METHODS["GetServerInfo"]))
    assert (failure.code, failure.message) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "the server does not know this token",
    )


def test_health_needs_no_credentials(guarded: LocalServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01"
        reflect: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as raised:
            list(reflect(iter([b"\x3a\x00"]), timeout=PATIENCE_SECONDS))
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_served_method_has_a_rule(guarded: LocalServer) -> None:
    served = guarded.inspect(lambda server: server.services.all)
    names = {method.full_name for service in served for method in service.descriptor.methods}
    assert names == set(RULES)
    assert {method.full_name for method in METHODS.values()} < names


def test_a_method_without_a_rule_is_refused(guarded: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["GetServerInfo"]
    monkeypatch.setattr("gradserve_server.rpc.boundary.interceptors.RULES", {})
    checks = guarded.inspect(lambda server: AccessChecks(server.access, FairCalls(9, ShareRules())))  # type: ignore[arg-type]

    async def answer(_request: Any, _call: Call) -> None:
        raise AssertionError("it was called")

    with pytest.raises(PermissionDeniedError, match="GetServerInfo"):
        checks.around(method, answer)(None, Call(method.full_name))


def test_a_refusal_names_the_role_the_container_and_the_call(guarded: LocalServer) -> None:
    method = METHODS["DeleteAccumulator"]
    with RawCalls(guarded.address, TOKENS["worker"]) as calls:
        failure = calls.fail(method.name, request_of(method))
    assert failure.message == (
        "gradserve.v1.AccumulatorService.DeleteAccumulator needs the role chief in the container 'team'; "
        "'worker' has the role worker there"
    )


@pytest.mark.parametrize(
    ("message", "container"),
    [
        (batch_norm_layer_messages_pb2.RunBatchNormUpdatesRequest(), "default"),
        ({"layer": {"container": "a"}}, "a"),
        ({"collection": {"container": "b"}}, "b"),
    ],
)
def test_the_container_of_either_target_counts(guarded: LocalServer, message: Any, container: str) -> None:
    request = batch_norm_layer_messages_pb2.RunBatchNormUpdatesRequest(**(message if isinstance(message, dict) else {}))
    with RawCalls(guarded.address, TOKENS["worker"]) as calls:
        assert f"in the container {container!r}" in calls.fail("RunBatchNormUpdates", request).message


def test_a_malformed_request_of_a_stranger_is_not_looked_at(guarded: LocalServer) -> None:
    with RawCalls(guarded.address) as calls:
        assert calls.fail("ApplyGradient", b"\xff").code is grpc.StatusCode.UNAUTHENTICATED
    with RawCalls(guarded.address, TOKENS["worker"]) as calls:
        assert calls.fail("ApplyGradient", b"\xff").code is grpc.StatusCode.INVALID_ARGUMENT
