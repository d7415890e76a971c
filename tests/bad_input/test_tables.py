"""Every bad request has its status, names its field and changes nothing."""

import pytest

from gradserve_protocol.v1 import tensor_messages_pb2
from tests.bad_input.gradient_tables import (
    BAD_GRADIENTS,
    MALFORMED_TENSORS,
    MISMATCHED_DENSE,
    MISMATCHED_SPARSE,
    USED_IDS,
)
from tests.bad_input.gru_tables import BAD_GRU_CALLS
from tests.bad_input.layer_norm_tables import BAD_LAYER_NORMS
from tests.bad_input.layer_tables import BAD_LAYERS
from tests.bad_input.lease_tables import BAD_LEASES
from tests.bad_input.op_tables import BAD_OPS
from tests.bad_input.parameter_tables import BAD_PARAMETERS
from tests.bad_input.requests import INVALID, Bad
from tests.bad_input.rnn_tables import BAD_RNNS
from tests.bad_input.tables import BAD_PAGES, BAD_READS, BAD_SPECS, BAD_WAITS, TAKEN_NAMES, UNKNOWN
from tests.servers.raw_calls import METHODS, RawCalls

TABLES = {
    "malformed tensor": MALFORMED_TENSORS,
    "dense": MISMATCHED_DENSE,
    "sparse": MISMATCHED_SPARSE,
    "gradient": BAD_GRADIENTS,
    "used id": USED_IDS,
    "wait": BAD_WAITS,
    "unknown": UNKNOWN,
    "spec": BAD_SPECS,
    "taken name": TAKEN_NAMES,
    "op": BAD_OPS,
    "gru": BAD_GRU_CALLS,
    "rnn": BAD_RNNS,
    "layer norm": BAD_LAYER_NORMS,
    "layer": BAD_LAYERS,
    "lease": BAD_LEASES,
    "parameters": BAD_PARAMETERS,
    "page": BAD_PAGES,
    "read": BAD_READS,
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, id=f"{table}-{number}-{bad.method}-{bad.message[:60]}")
        for table, entries in TABLES.items()
        for number, bad in enumerate(entries)
    ],
)
def test_a_bad_request_fails_and_changes_nothing(raw: RawCalls, bad: Bad) -> None:
    bad.check(raw.fail(bad.method, bad.request))


MALFORMED_BYTES = {
    "half a varint": b"\x80",
    "half a field": b"\x0a\x7fabc",
    "length of 2^35": b"\x0a\xff\xff\xff\xff\x7f",
    "end of a group that never began": b"\x0c",
    "group without an end": b"\x0b",
    "wire type 7": b"\x0f",
    "noise": bytes(range(255, 0, -1)),
    "endless groups": b"\x0b" * 10_000,
}


@pytest.mark.sampled
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("message", list(MALFORMED_BYTES.values()), ids=list(MALFORMED_BYTES))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_bytes_that_are_no_message(raw: RawCalls, method: str, message: bytes) -> None:
    failure = raw.fail(method, message)
    assert failure.code is INVALID
    assert failure.message.startswith("the message is not valid protobuf of the expected type")


@pytest.mark.usefixtures("unchanged")
def test_text_that_is_not_utf8(raw: RawCalls) -> None:
    failure = raw.fail("GetAccumulator", b"\x0a\x04\x12\x02\xff\xfe")
    assert failure.code is INVALID


Put = tensor_messages_pb2.PutTensorsRequest
