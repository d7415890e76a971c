"""Uploads that break, lie or stop, and ids used twice."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import (
    DENSE,
    EXHAUSTED,
    F32,
    INT64_MAX,
    INT64_MIN,
    INVALID,
    MIB,
    OK,
    SHAPE,
    SPECS,
    Apply,
    Create,
    Take,
    bad_gradient,
    check_field,
    dense,
    identity,
    ref,
    sparse,
    state,
    zeros,
)
from tests.bad_input.test_tables import Put
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls


def header(*shapes: Sequence[int], dtype: Any = F32, **fields: Any) -> Put:
    specs = [tensor_pb2.TensorSpec(dtype=dtype, shape=shape) for shape in shapes]
    return Put(header=tensor_messages_pb2.PutTensorsHeader(tensors=specs, **fields))


def chunk(num_bytes: int) -> Put:
    return Put(chunk=bytes(num_bytes))


TENSOR = "header.tensors[0]"

BAD_STREAMS: list[tuple[str, list[Put | bytes], str, str | None, grpc.StatusCode]] = [
    ("empty stream", [], "expected a header as the first message, got an empty stream", "header", INVALID),
    ("chunk first", [chunk(4)], "expected a header as the first message, got a chunk", "header", INVALID),
    ("empty chunk first", [chunk(0)], "expected a header as the first message, got a chunk", "header", INVALID),
    ("neither first", [b""], "expected a header as the first message, got neither part", "header", INVALID),
    ("unknown first", [b"\x1a\x00"], "expected a header as the first message, got neither part", "header", INVALID),
    ("header overridden", [b"\x0a\x00\x12\x00"], "first message, got a chunk", "header", INVALID),
    ("header twice", [header([1]), header([1])], "expected a chunk after the header, got header", "chunk", INVALID),
    ("header last", [header([1]), chunk(4), header([1])], "after the header, got header", "chunk", INVALID),
    ("neither later", [header([1]), b""], "expected a chunk after the header, got neither part", "chunk", INVALID),
    ("no tensors", [header()], "expected at least one tensor, got none", "header.tensors", INVALID),
    ("no payload", [header([1])], "expected a payload of 4 bytes as the header says, got 0", "chunk", INVALID),
    ("short", [header([3], [5]), chunk(31)], "a payload of 32 bytes as the header says, got 31", "chunk", INVALID),
    ("long", [header([3], [5]), chunk(33)], "of 32 bytes as the header says, got 33 or more", "chunk", INVALID),
    ("long later", [header([1]), chunk(4), chunk(0), chunk(1)], "got 5 or more", "chunk", INVALID),
    ("long for nothing", [header([0]), chunk(1)], "expected a payload of 0 bytes", "chunk", INVALID),
    ("endless", [header([1]), *[chunk(MIB)] * 40], "expected a payload of 4 bytes", "chunk", INVALID),
    ("no dtype", [header([1], dtype=0)], "expected a known DataType, got 0", f"{TENSOR}.dtype", INVALID),
    ("unknown dtype", [header([1], dtype=99)], "expected a known DataType, got 99", f"{TENSOR}.dtype", INVALID),
    ("negative", [header([-1])], "expected dimensions of at least 0, got -1", f"{TENSOR}.shape", INVALID),
    ("negative twice", [header([-1, -4])], "expected dimensions of at least 0", f"{TENSOR}.shape", INVALID),
    ("least", [header([INT64_MIN])], "expected dimensions of at least 0", f"{TENSOR}.shape", INVALID),
    ("second", [header([1], [-1])], "expected dimensions of at least 0", "header.tensors[1].shape", INVALID),
    ("overflow", [header([INT64_MAX])], "expected less than 2^63 bytes", f"{TENSOR}.shape", INVALID),
    ("overflow to 0", [header([1 << 32, 1 << 32])], "expected less than 2^63 bytes", f"{TENSOR}.shape", INVALID),
    ("empty overflow", [header([0, 1 << 62])], "expected less than 2^63 bytes", f"{TENSOR}.shape", INVALID),
    ("many dimensions", [header([1] * 65)], "expected at most 64 dimensions, got 65", f"{TENSOR}.shape", INVALID),
    ("more dimensions", [header([9] * 10**6)], "expected at most 64 dimensions", f"{TENSOR}.shape", INVALID),
    ("2 EiB", [header([1 << 59])], f"{1 << 61} asked for, ", None, EXHAUSTED),
    ("2 EiB and more", [header(*[[1 << 59]] * 100)], f"{100 << 61} asked for, ", None, EXHAUSTED),
    ("lease 0", [header([1], lease=Duration()), chunk(4)], "expected a positive lease", "header.lease", INVALID),
    ("lease -1", [header([1], lease=Duration(seconds=-1)), chunk(4)], "a positive lease", "header.lease", INVALID),
    ("no message", [b"\x0a\x7f"], "the message is not valid protobuf", None, INVALID),
    ("no message later", [header([1]), b"\x12\x7f"], "the message is not valid protobuf", None, INVALID),
    ("no chunk length", [header([1]), b"\x12"], "the message is not valid protobuf", None, INVALID),
    ("17 MiB message", [header([5 << 20]), chunk(17 * MIB)], "Received message larger than max", None, EXHAUSTED),
]


@pytest.mark.sampled(every=2)
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("stream", "message", "field", "code"), [bad[1:] for bad in BAD_STREAMS], ids=[bad[0] for bad in BAD_STREAMS]
)
def test_a_bad_upload_leaves_nothing_behind(
    raw: RawCalls, stream: list[Put | bytes], message: str, field: str | None, code: grpc.StatusCode
) -> None:
    failure = raw.fail("PutTensors", *stream)
    assert (failure.code, failure.field) == (code, field)
    assert message in failure.message
    check_field(failure.field, "PutTensors", stream[0] if stream and isinstance(stream[0], Put) else None)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_an_upload_that_is_cancelled_leaves_nothing_behind(raw: RawCalls, chunks: int) -> None:
    hold = threading.Event()

    def requests() -> Iterator[Message]:
        yield header([MIB])
        for _ in range(chunks):
            yield chunk(MIB)
        hold.wait(PATIENCE_SECONDS)

    before = memory_in_use(raw)
    call = raw.start_stream("PutTensors", requests())
    # Memory is reserved from the header on.
    eventually(lambda: memory_in_use(raw), lambda used: used == before + 4 * MIB)
    call.cancel()
    hold.set()
    eventually(lambda: memory_in_use(raw), before.__eq__)


def memory_in_use(raw: RawCalls) -> int:
    used: int = raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).usage.num_bytes
    return used


@pytest.mark.usefixtures("unchanged")
def test_a_connection_that_breaks_leaves_nothing_behind(server_address: str, raw: RawCalls) -> None:
    hold = threading.Event()

    def requests() -> Iterator[Message]:
        yield header([MIB])
        hold.wait(PATIENCE_SECONDS)

    before = memory_in_use(raw)
    with RawCalls(server_address) as other:
        # Held on to: calls that nobody refers to are cancelled.
        upload = other.start_stream("PutTensors", requests(), timeout=None)
        take = other.start("TakeGradient", Take(accumulator=ref("any"), num_required=3), timeout=None)
        eventually(lambda: memory_in_use(raw), lambda used: used == before + 4 * MIB)
        eventually(lambda: state(raw)[2].num_waiters, lambda waiters: waiters == 1)
        assert not upload.done()
        assert not take.done()
    hold.set()


@pytest.mark.usefixtures("unchanged")
def test_a_stored_tensor_that_does_not_fit_stays(raw: RawCalls) -> None:
    (stored,) = raw.call("PutTensors", header([3, 2]), chunk(24)).tensors
    handle = {"handle": stored.handle}
    wrong = [
        ("Shape mismatch: expected [?,3], got [3,2]", SHAPE, handle),
        (
            "expected the stored tensor's shape [3, 2] of float32, got [2, 3] of float32",
            DENSE,
            {**handle, "dtype": F32, "shape": [2, 3]},
        ),
        ("got [3, 2] of float64", DENSE, {**handle, "dtype": tensor_pb2.DATA_TYPE_FLOAT64, "shape": [3, 2]}),
        ("expected a known DataType, got 99", f"{DENSE}.dtype", {**handle, "dtype": 99}),
        ("expected dimensions of at least 0, got -1", SHAPE, {**handle, "dtype": F32, "shape": [-1]}),
    ]
    for message, field, value in wrong:
        for bad in bad_gradient("matrix", message, field, dense(value), release_handles=True):
            bad.check(raw.fail(bad.method, bad.request))
    deleted = raw.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[stored.handle]))
    assert deleted.num_deleted == 1


@pytest.mark.usefixtures("unchanged")
def test_a_refused_id_is_free_again(raw: RawCalls, name: str) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=SPECS["matrix"]))
    mine: dict[str, Any] = {"accumulator": ref(name), "request_id": identity(1)}
    assert raw.fail("ApplyGradient", Apply(**mine, gradient=[dense(zeros(7))])).code is INVALID
    answer = raw.call("ApplyGradient", Apply(**mine, gradient=[dense(OK)]))
    assert (answer.duplicate, answer.num_accumulated) == (False, 1)
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


@pytest.mark.usefixtures("unchanged")
def test_an_id_with_another_dense_shape_is_another_content(raw: RawCalls, name: str) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=SPECS["any rows"]))
    mine: dict[str, Any] = {"accumulator": ref(name), "request_id": identity(1)}
    raw.call("ApplyGradient", Apply(**mine, gradient=[sparse([0], (1, 2), [4, 2])]))
    assert raw.call("ApplyGradient", Apply(**mine, gradient=[sparse([0], (1, 2), [4, 2])])).duplicate
    for other in (None, [], [4, 3]):
        failure = raw.fail("ApplyGradient", Apply(**mine, gradient=[sparse([0], (1, 2), other)]))
        assert (failure.code, failure.field) == (INVALID, "request_id")
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


@pytest.mark.usefixtures("unchanged")
def test_deleting_what_is_not_there(raw: RawCalls) -> None:
    for unknown in (ref("nobody"), ref("matrix", container="c"), ref("matrix", incarnation="earlier")):
        request = messages_pb2.DeleteAccumulatorRequest(accumulator=unknown)
        assert not raw.call("DeleteAccumulator", request).deleted
    handles = tensor_messages_pb2.DeleteTensorsRequest(handles=["", "nobody", "nobody", "x" * MIB])
    assert raw.call("DeleteTensors", handles).num_deleted == 0
