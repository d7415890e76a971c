"""Clients of earlier versions at a server of this version, and their servers for a client of this version.

What was recorded of a training session goes byte for byte to a new server, but for handles and incarnations, which each
server makes anew; and the answers of the recorded server go to this version's client.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import gradserve
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.golden import client_session
from tests.golden.recorded_calls import RecordedCall, player, read, recordings, start
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import METHODS

RECORDINGS = recordings()

VARIES = {
    "gradserve.v1.GetServerInfoResponse": {
        *("version", "devices", "limits", "usage", "uptime", "sockets", "why_no_gpu", "http_url", "time"),
        *("device", "ops_prepared"),
    },
    "gradserve.v1.AccumulatorInfo": {"num_bytes"},
    "gradserve.v1.BatchNormLayerInfo": {"num_bytes"},
    "gradserve.v1.ParametersInfo": {"num_bytes"},
    "gradserve.v1.RoundRecord": {"end_time", "hash"},
    "gradserve.v1.StoredTensor": {"lease_remaining"},
}
"""The fields of answers that depend on the version, the machine, its memory or the time, by message."""

ADDED: set[str] = set()
"""The full names of the fields that later servers set in these answers, and earlier ones did not know."""

MADE_ANEW = re.compile(r"[0-9a-f]{32,}")
"""Handles and incarnations: a client sends back what it got."""

UNTIL_THE_CLIENT_ENDS = "HoldClientLease"
_SINGLE = (Message, str, bytes, int, float)


def differences(recorded: Message, present: Message, ids: dict[str, str]) -> Iterator[str]:
    """Compares answers by what they mean; adds what the server has made anew to `ids`."""
    if isinstance(recorded, tensor_pb2.Tensor) and recorded.content:
        if not same_elements(recorded, present):
            yield f"a tensor: expected {recorded}, got {present}"
        return
    varies = VARIES.get(recorded.DESCRIPTOR.full_name, ())
    values, others = (dict(each.ListFields()) for each in (recorded, present))
    for field in values.keys() | others.keys():
        if field.name in varies:
            continue
        if field not in others:
            yield f"{field.full_name}: expected {values[field]}, got nothing"
        elif field not in values:
            if field.full_name not in ADDED:
                yield f"{field.full_name}: expected nothing, got {others[field]}"
        else:
            yield from value_differences(field, values[field], others[field], ids)


def value_differences(field: FieldDescriptor, expected: Any, got: Any, ids: dict[str, str]) -> Iterator[str]:
    """Compares the values of a field."""
    if isinstance(expected, Mapping):
        if dict(expected) != dict(got):
            yield f"{field.full_name}: expected {expected}, got {got}"
        return
    recorded, present = ([expected], [got]) if isinstance(expected, _SINGLE) else (expected, got)
    if len(recorded) != len(present):
        yield f"{field.full_name}: expected {len(recorded)} values, got {len(present)}"
    for one, other in zip(recorded, present, strict=False):
        if isinstance(one, Message):
            yield from differences(one, other, ids)
        elif isinstance(one, str) and MADE_ANEW.fullmatch(one) and MADE_ANEW.fullmatch(other):
            ids[one] = other
        elif one != other:
            yield f"{field.full_name}: expected {one!r}, got {other!r}"


def same_elements(recorded: Any, present: Any) -> bool:
    """Compares tensors as closely as processors round alike."""
    if (recorded.dtype, list(recorded.shape)) != (present.dtype, list(present.shape)):
        return False
    name = tensor_pb2.DataType.Name(recorded.dtype).removeprefix("DATA_TYPE_").lower()
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    one, other = (np.frombuffer(each.content, dtype).astype(np.float64) for each in (recorded, present))
    return np.allclose(one, other, rtol=1e-5, atol=1e-6)


def with_present_ids(request: bytes, ids: Mapping[str, str]) -> bytes:
    """Replaces what the recorded server made by what this one has made. Lengths are equal, so all else stays."""
    for recorded, present in ids.items():
        assert len(recorded) == len(present), "ids have another length now, which requests hold: encode them anew"
        request = request.replace(recorded.encode(), present.encode())
    return request


def replay(channel: grpc.Channel, calls: list[RecordedCall]) -> Iterator[str]:
    """Sends recorded requests, one call after the other; yields how the answers differ from the recorded ones."""
    ids: dict[str, str] = {}
    held = []
    for call in calls:
        requests = [with_present_ids(each, ids) for each in call.requests]
        answer = start(channel, call.path, requests, timeout=PATIENCE_SECONDS)
        if call.method == UNTIL_THE_CLIENT_ENDS:
            held.append((call, answer))
        else:
            yield from answer_differences(call, answer, ids)
    for call, answer in held:
        yield from answer_differences(call, answer, ids)


def answer_differences(call: RecordedCall, answer: Any, ids: dict[str, str]) -> Iterator[str]:
    """Compares how a call ended with what was recorded."""
    reply_type = METHODS[call.method].output_type._concrete_class
    try:
        replies = list(answer)
    except grpc.RpcError:
        replies = []
    if answer.code().name != call.code:
        yield f"{call.method}: expected {call.code}, got {answer.code().name}: {answer.details()}"
    elif len(replies) != len(call.replies):
        yield f"{call.method}: expected {len(call.replies)} messages, got {len(replies)}"
    else:
        for recorded, present in zip(call.replies, replies, strict=True):
            for each in differences(reply_type.FromString(recorded), reply_type.FromString(present), ids):
                yield f"{call.method}: {each}"


@pytest.fixture(params=RECORDINGS)
def calls(request: pytest.FixtureRequest) -> list[RecordedCall]:
    return read(RECORDINGS[request.param])


def test_the_calls_of_this_version_are_recorded() -> None:
    assert gradserve.__version__ in RECORDINGS, "python -m tests.golden.make_client_calls records them"


def test_the_recording_is_of_a_whole_session(calls: list[RecordedCall]) -> None:
    services = {call.path.split("/")[1].rpartition(".")[2] for call in calls}
    assert services == {
        *("AccumulatorService", "BatchNormLayerService", "GradientOpsService", "LeaseService"),
        *("ParameterService", "ServerService", "TensorService"),
    }
    assert {call.code for call in calls} == {"OK", "NOT_FOUND"}


@pytest.mark.usefixtures("_compiled_kernels")
def test_the_server_understands_the_client(calls: list[RecordedCall]) -> None:
    config = ServerConfig(runtime=RuntimeConfig(device="cpu"))
    with LocalServer(config) as server, grpc.insecure_channel(server.address) as channel:
        assert list(replay(channel, calls)) == []
        with gradserve.connect(server.address) as client:
            assert (client.list_accumulators(), client.list_parameters()) == ([], [])  # of tensors, some await leases


def test_the_client_understands_the_server(calls: list[RecordedCall]) -> None:
    with player(calls) as address:
        client_session.run(address)


def test_a_changed_answer_is_noticed(calls: list[RecordedCall]) -> None:
    """So that the comparison is one: each answer of the recording differs from an empty one in what it holds."""
    for call in calls:
        reply_type = METHODS[call.method].output_type._concrete_class
        for reply in call.replies:
            recorded = reply_type.FromString(reply)
            if call.method != "GetServerInfo" and reply:
                assert list(differences(recorded, reply_type(), {})) != []
                assert list(differences(reply_type(), recorded, {})) != []
            assert list(differences(recorded, recorded, {})) == []
