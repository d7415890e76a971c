"""No request, however malformed, kills the server, changes state it should not, or leaves memory behind.

The accumulators that the table uses are made once: as no request of the table may change anything, all can share
them, and after each of them everything must be as it was.
"""

import base64
import math
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from pydantic import ByteSize

import gradserve
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2, server_messages_pb2, tensor_messages_pb2, tensor_pb2
from gradserve.wire.dtypes import to_data_type
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_server.testing import LocalServer
from tests.raw_calls import METHODS, Failure, RawCalls, eventually, failure_of

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DEADLINE, OUT_OF_RANGE = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OUT_OF_RANGE
EXHAUSTED, ABORTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED
F32 = tensor_pb2.DATA_TYPE_FLOAT32
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
MIB = 1 << 20
OK = {"dtype": F32, "shape": [2, 3], "content": bytes(24)}

Create = messages_pb2.CreateAccumulatorRequest
Apply = messages_pb2.ApplyGradientRequest
Take = messages_pb2.TakeGradientRequest
Read = messages_pb2.ReadAverageRequest
PushPull = messages_pb2.PushPullRequest


def ref(name: str, **fields: Any) -> accumulator_pb2.AccumulatorRef:
    return accumulator_pb2.AccumulatorRef(name=name, **fields)


def tensor(array: Any, dtype: Any = np.float32) -> tensor_pb2.Tensor:
    given = np.asarray(array, dtype)
    return tensor_pb2.Tensor(dtype=to_data_type(given.dtype), shape=given.shape, content=given.tobytes())


def zeros(*shape: int) -> tensor_pb2.Tensor:
    return tensor(np.zeros(shape))


def dense(value: tensor_pb2.Tensor | dict[str, Any], name: str = "") -> accumulator_pb2.ComponentGradient:
    message = tensor_pb2.Tensor(**value) if isinstance(value, dict) else value
    return accumulator_pb2.ComponentGradient(name=name, dense=message)


def sparse(
    indices: Any, values: Any, dense_shape: Sequence[int] | None = None, name: str = ""
) -> accumulator_pb2.ComponentGradient:
    slices = accumulator_pb2.SparseGradient(
        indices=indices if isinstance(indices, tensor_pb2.Tensor) else tensor(indices, np.int64),
        values=values if isinstance(values, tensor_pb2.Tensor) else zeros(*values),
        dense_shape=None if dense_shape is None else accumulator_pb2.DenseShape(dims=dense_shape),
    )
    return accumulator_pb2.ComponentGradient(name=name, sparse=slices)


def component(
    name: str = "", dtype: Any = F32, dims: Sequence[int] | None = None, **fields: Any
) -> accumulator_pb2.ComponentSpec:
    shape = accumulator_pb2.PartialShape(unknown_rank=dims is None, dims=dims or ())
    return accumulator_pb2.ComponentSpec(name=name, dtype=dtype, shape=shape, **fields)


def spec(*components: accumulator_pb2.ComponentSpec, **fields: Any) -> accumulator_pb2.AccumulatorSpec:
    return accumulator_pb2.AccumulatorSpec(components=components, **fields)


def identity(sequence: int, client_id: str = "somebody") -> accumulator_pb2.RequestId:
    return accumulator_pb2.RequestId(client_id=client_id, sequence=sequence)


SPARSE: Any = {"layout": accumulator_pb2.LAYOUT_SPARSE}
SPECS = {
    "matrix": spec(component(dims=[-1, 3])),
    "begun": spec(component(dims=[-1, 3])),
    "any": spec(component()),
    "scalar": spec(component(dims=[])),
    "half": spec(component(dtype=tensor_pb2.DATA_TYPE_FLOAT16)),
    "rows": spec(component(dims=[2, 2, -1], **SPARSE)),
    "rows begun": spec(component(dims=[2, 2, -1], **SPARSE)),
    "any rows": spec(component(**SPARSE)),
    "model": spec(component("w", dims=[2]), component("e", dims=[-1, 2], **SPARSE)),
    "named": spec(component("only", dims=[2])),
    "ordered": spec(component(dims=[2, 3]), deterministic=True),
    "stepped": spec(component(dims=[2, 3])),
    "wide": spec(component(), accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT64),
}
BEGIN = {
    "begun": dense(zeros(2, 3)),
    "rows begun": sparse([0], (1, 2, 2, 2)),
}
USED = Apply(accumulator=ref("stepped"), request_id=identity(7), local_step=5, gradient=[dense(OK)], worker_id="w")


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A server of this file alone, as its use is compared."""
    with LocalServer() as local:
        yield local


@pytest.fixture(scope="module")
def server_address(server: LocalServer) -> str:
    return server.address


@pytest.fixture(scope="module")
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        for name, each in SPECS.items():
            calls.call("CreateAccumulator", Create(accumulator=ref(name), spec=each))
        for name, part in BEGIN.items():
            calls.call("ApplyGradient", Apply(accumulator=ref(name), gradient=[part], worker_id="first"))
        calls.call("ApplyGradient", Apply(accumulator=ref("stepped"), gradient=[dense(OK)]))
        calls.call("TakeGradient", Take(accumulator=ref("stepped"), num_required=1))
        calls.call("SetGlobalStep", messages_pb2.SetGlobalStepRequest(accumulator=ref("stepped"), global_step=5))
        calls.call("ApplyGradient", USED)
        yield calls


def state(raw: RawCalls) -> tuple[Any, ...]:
    """Returns all that requests could change, as far as it can be seen."""
    accumulators = raw.call("ListAccumulators", messages_pb2.ListAccumulatorsRequest())
    assert not accumulators.next_page_token
    tensors = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest())
    usage = raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).usage
    return accumulators, [each.handle for each in tensors.tensors], usage


@pytest.fixture
def unchanged(raw: RawCalls) -> Iterator[None]:
    """Checks that a test leaves the server as it was, and able to answer."""
    before = state(raw)
    yield
    # An upload that was broken off gives its memory back when the server notices.
    eventually(lambda: state(raw), before.__eq__)


def check_field(path: str | None, method: str, request: Any) -> None:
    """Checks that a path leads to a field that the method's request has, and to an element that is there."""
    if path is None:
        return
    at: Descriptor | None = METHODS[method].input_type
    for segment in path.split("."):
        match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", segment)
        assert match, f"{segment!r} of {path!r} is neither a field nor an element"
        assert at is not None, f"{path!r} goes on beyond {match[1]!r}'s parent"
        assert match[1] in at.fields_by_name, f"{at.name} has no {match[1]!r}, as {path!r} says"
        field = at.fields_by_name[match[1]]
        value = getattr(request, match[1], None)
        if match[2] is not None:
            assert field.is_repeated, f"{match[1]!r} of {path!r} has no elements"
            value = value[int(match[2])] if value is not None else None
        request, at = value, field.message_type


@dataclass(frozen=True)
class Bad:
    """A request, and how it must fail."""

    method: str
    request: Message
    message: str
    field: str | None = None
    code: grpc.StatusCode = INVALID

    def check(self, failure: Failure) -> None:
        assert failure.code is self.code, failure
        assert self.message in failure.message
        assert failure.field == self.field
        check_field(failure.field, self.method, self.request)


def bad_gradient(name: str, message: str, field: str | None, *parts: Any, **fields: Any) -> list[Bad]:
    """Returns a gradient that must be refused, as an apply and as a push_pull."""
    code = fields.pop("code", INVALID)
    apply = Apply(accumulator=ref(name), gradient=parts, **fields)
    push = PushPull(accumulator=ref(name), gradient=parts, num_required=1, **fields)
    return [Bad("ApplyGradient", apply, message, field, code), Bad("PushPull", push, message, field, code)]


DENSE, SHAPE = "gradient[0].dense", "gradient[0].dense.shape"
INDICES, VALUES = "gradient[0].sparse.indices", "gradient[0].sparse.values"
DENSE_SHAPE = "gradient[0].sparse.dense_shape"


def dense_of(**fields: Any) -> accumulator_pb2.ComponentGradient:
    return dense({**OK, **fields})


MALFORMED_TENSORS = [
    *bad_gradient("matrix", "expected a known DataType, got 0", f"{DENSE}.dtype", dense_of(dtype=0)),
    *bad_gradient("matrix", "expected a known DataType, got 99", f"{DENSE}.dtype", dense_of(dtype=99)),
    *bad_gradient("matrix", "expected a known DataType, got -1", f"{DENSE}.dtype", dense_of(dtype=-1)),
    *bad_gradient(
        "matrix",
        "expected 24 bytes for shape [2, 3] of float32, got 23",
        f"{DENSE}.content",
        dense_of(content=bytes(23)),
    ),
    *bad_gradient("matrix", "got 25", f"{DENSE}.content", dense_of(content=bytes(25))),
    *bad_gradient("matrix", "got 0", f"{DENSE}.content", dense_of(content=b"")),
    *bad_gradient("scalar", "expected 4 bytes for shape [] of float32", f"{DENSE}.content", dense_of(shape=[])),
    *bad_gradient("matrix", "expected dimensions of at least 0, got -2", SHAPE, dense_of(shape=[-2, -3])),
    *bad_gradient("matrix", f"at least 0, got {INT64_MIN}", SHAPE, dense_of(shape=[INT64_MIN, 3])),
    *bad_gradient("matrix", "expected less than 2^63 bytes", SHAPE, dense_of(shape=[INT64_MAX])),
    *bad_gradient("matrix", "expected less than 2^63 bytes", SHAPE, dense_of(shape=[INT64_MAX, INT64_MAX])),
    *bad_gradient("matrix", "expected less than 2^63 bytes", SHAPE, dense_of(shape=[1 << 32, 1 << 32])),
    *bad_gradient("any", "expected less than 2^63 bytes", SHAPE, dense_of(shape=[0, 1 << 62], content=b"")),
    *bad_gradient(
        "matrix", "bytes for shape [1099511627776] of float32, got 24", f"{DENSE}.content", dense_of(shape=[1 << 40])
    ),
    *bad_gradient("any", "expected at most 64 dimensions, got 65", SHAPE, dense_of(shape=[1] * 65, content=bytes(4))),
    *bad_gradient("any", "at most 64 dimensions, got 100000", SHAPE, dense_of(shape=[1] * 100_000, content=bytes(4))),
    *bad_gradient("any", "at most 64 dimensions, got 100000", SHAPE, dense_of(shape=[2] * 100_000, content=bytes(4))),
    *bad_gradient("matrix", "expected content or a handle, got neither", DENSE, dense({"dtype": F32, "shape": [2, 3]})),
    *bad_gradient(
        "matrix", "no tensor with the handle 'nobody'", f"{DENSE}.handle", dense({"handle": "nobody"}), code=NOT_FOUND
    ),
    *bad_gradient("matrix", "no tensor with the handle ''", f"{DENSE}.handle", dense({"handle": ""}), code=NOT_FOUND),
    *bad_gradient(
        "any rows",
        "no tensor with the handle 'nobody'",
        f"{VALUES}.handle",
        sparse([0], tensor_pb2.Tensor(handle="nobody")),
        code=NOT_FOUND,
    ),
    *bad_gradient(
        "model",
        "no tensor with the handle 'nobody'",
        "gradient[1].dense.handle",
        sparse([], (0, 2), name="e"),
        dense({"handle": "nobody"}, "w"),
        code=NOT_FOUND,
        release_handles=True,
    ),
]

MISMATCHED_DENSE = [
    *bad_gradient(
        "matrix", "expected dtype float32, got float64", f"{DENSE}.dtype", dense(tensor([[1, 2, 3]], np.float64))
    ),
    *bad_gradient(
        "matrix", "expected dtype float32, got int32", f"{DENSE}.dtype", dense(tensor([[1, 2, 3]], np.int32))
    ),
    *bad_gradient(
        "half", "expected dtype float16, got bfloat16", f"{DENSE}.dtype", dense(tensor([1], ml_dtypes.bfloat16))
    ),
    *bad_gradient("matrix", "Shape mismatch: expected [?,3], got [3,2]", SHAPE, dense(zeros(3, 2))),
    *bad_gradient("matrix", "Shape mismatch: expected [?,3], got [3]", SHAPE, dense(zeros(3))),
    *bad_gradient("matrix", "Shape mismatch: expected [?,3], got []", SHAPE, dense(zeros())),
    *bad_gradient("matrix", "Shape mismatch: expected [?,3], got [0,0]", SHAPE, dense(zeros(0, 0))),
    *bad_gradient("matrix", "Shape mismatch: expected [?,3], got [2,3,1]", SHAPE, dense(zeros(2, 3, 1))),
    *bad_gradient("scalar", "Shape mismatch: expected [], got [1]", SHAPE, dense(zeros(1))),
    # The shape of the round is looked at before that of the accumulator.
    *bad_gradient("begun", "Shape mismatch: expected [2,3], got [1,3]", SHAPE, dense(zeros(1, 3))),
    *bad_gradient("begun", "Shape mismatch: expected [2,3], got [7]", SHAPE, dense(zeros(7))),
    # Also when it is stale, and the round does not count then.
    *bad_gradient("stepped", "Shape mismatch: expected [2,3], got [3,2]", SHAPE, dense(zeros(3, 2)), local_step=4),
    *bad_gradient(
        "stepped", "Shape mismatch: expected [2,3], got [3,2]", SHAPE, dense(zeros(3, 2)), local_step=INT64_MIN
    ),
    *bad_gradient(
        "stepped", "Shape mismatch: expected [2,3], got [3,2]", SHAPE, dense(zeros(3, 2)), local_step=INT64_MAX
    ),
    *bad_gradient("stepped", "expected dtype float32, got float64", f"{DENSE}.dtype", dense(tensor([1], np.float64))),
]

MISMATCHED_SPARSE = [
    # In the order of the checks, each with everything after it wrong too.
    *bad_gradient(
        "rows",
        "Input indices should be vector but received shape: [2,2]",
        INDICES,
        sparse([[9, 9], [9, 9]], (), [3]),
    ),
    *bad_gradient("rows", "Input indices should be vector but received shape: []", INDICES, sparse(9, (1,), [3])),
    *bad_gradient("rows", "Values cannot be 0-dimensional.", VALUES, sparse([9, 9], (), [3])),
    *bad_gradient("rows", "Expected 2 non-empty input values, got 3", VALUES, sparse([9, 9], (3,), [3])),
    *bad_gradient("rows", "Expected 0 non-empty input values, got 1", VALUES, sparse([], (1,), [3])),
    *bad_gradient(
        "rows", "Shape mismatch: expected shape rank at least 3, got 2", DENSE_SHAPE, sparse([9], (1,), [3, 3])
    ),
    *bad_gradient("rows", "Shape mismatch: expected shape rank at least 3, got 0", DENSE_SHAPE, sparse([9], (1,), [])),
    *bad_gradient(
        "rows", "Shape mismatch: expected shape dim 0 to be 2, got 3", DENSE_SHAPE, sparse([9], (1,), [3, 3, 2])
    ),
    *bad_gradient(
        "rows", "Shape mismatch: expected shape dim 1 to be 2, got 3", DENSE_SHAPE, sparse([9], (1,), [2, 3, 2])
    ),
    *bad_gradient(
        "rows",
        "Shape mismatch: index of slice 1 exceeded limits of shape; index is 9 exceeded 2",
        INDICES,
        sparse([0, 9, -1], (3,), [2, 2, -5]),
    ),
    *bad_gradient(
        "rows",
        f"index of slice 0 exceeded limits of shape; index is {INT64_MAX} exceeded 2",
        INDICES,
        sparse([INT64_MAX], (1, 2, 1)),
    ),
    *bad_gradient(
        "rows",
        "index of slice 0 exceeded limits of shape; index is 2 exceeded 2",
        INDICES,
        sparse(tensor([2], np.int32), (1, 2, 1)),
    ),
    *bad_gradient("rows", "expected indices of at least 0, got -1 at 1", INDICES, sparse([1, -1], (2,))),
    *bad_gradient("any rows", f"expected indices of at least 0, got {INT64_MIN}", INDICES, sparse([INT64_MIN], (1,))),
    *bad_gradient("rows", "Shape mismatch: expected values rank at least 3, got 2", VALUES, sparse([0, 1], (2, 2))),
    *bad_gradient("rows", "Shape mismatch: expected values dim 1 to be 2, got 3", VALUES, sparse([0], (1, 3, 2))),
    *bad_gradient("rows begun", "Shape mismatch: expected values rank 4, got 3", VALUES, sparse([0], (1, 3, 2))),
    *bad_gradient("rows begun", "Shape mismatch: expected values rank 4, got 5", VALUES, sparse([0], (1, 2, 2, 2, 2))),
    *bad_gradient(
        "rows begun", "Shape mismatch: expected values dim 1 to be 2, got 3", VALUES, sparse([0], (1, 3, 2, 3))
    ),
    *bad_gradient(
        "rows begun", "Shape mismatch: expected values dim 3 to be 2, got 3", VALUES, sparse([0], (1, 2, 2, 3))
    ),
    *bad_gradient(
        "rows", "expected dtype int64 or int32, got float32", f"{INDICES}.dtype", sparse(tensor([0.0]), (1,))
    ),
    *bad_gradient(
        "rows", "expected dtype int64 or int32, got uint64", f"{INDICES}.dtype", sparse(tensor([0], np.uint64), (1,))
    ),
    *bad_gradient(
        "rows", "expected dtype float32, got float64", f"{VALUES}.dtype", sparse([0], tensor([1], np.float64))
    ),
    *bad_gradient("rows", "expected content or a handle, got neither", INDICES, sparse(tensor_pb2.Tensor(), (1,))),
    *bad_gradient(
        "rows",
        "expected 8 bytes for shape [1] of int64, got 7",
        f"{INDICES}.content",
        sparse(tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT64, shape=[1], content=bytes(7)), (1,)),
    ),
]

BAD_GRADIENTS = [
    *bad_gradient("model", "expected every component, got none for ['e']", "gradient", dense(zeros(2), "w")),
    *bad_gradient("model", "expected every component, got none for ['e', 'w']", "gradient"),
    *bad_gradient("matrix", "expected every component, got none for ['']", "gradient"),
    *bad_gradient(
        "model",
        "expected components ['e', 'w'], got 'x'",
        "gradient[1].name",
        dense(zeros(2), "w"),
        dense(zeros(2), "x"),
    ),
    *bad_gradient("model", "expected components ['e', 'w'], got ''", "gradient[0].name", dense(zeros(2))),
    *bad_gradient("named", "expected components ['only'], got 'x'", "gradient[0].name", dense(zeros(2), "x")),
    *bad_gradient("matrix", "expected every component once, got '' twice", "gradient[1].name", dense(OK), dense(OK)),
    *bad_gradient(
        "named",
        "expected every component once, got 'only' twice",
        "gradient[1].name",
        dense(zeros(2)),
        dense(zeros(2), "only"),
    ),
    *bad_gradient("matrix", "expected a dense value for component '', got sparse", "gradient[0]", sparse([0], (1,))),
    *bad_gradient("rows", "expected a sparse value for component '', got dense", "gradient[0]", dense(OK)),
    *bad_gradient(
        "matrix",
        "expected a dense value for component '', got none",
        "gradient[0]",
        accumulator_pb2.ComponentGradient(),
    ),
    *bad_gradient(
        "model",
        "Shape mismatch: expected [2], got [3]",
        "gradient[1].dense.shape",
        sparse([0], (1, 2), name="e"),
        dense(zeros(3), "w"),
    ),
    *bad_gradient(
        "model",
        "Shape mismatch: expected values dim 1 to be 2, got 3",
        "gradient[0].sparse.values",
        sparse([0], (1, 3), name="e"),
        dense(zeros(2), "w"),
    ),
    *(
        bad
        for weight in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf)
        for bad in bad_gradient("matrix", "expected a positive, finite weight", "weight", dense(OK), weight=weight)
    ),
    *bad_gradient(
        "ordered", "expected a worker_id, as accumulator 'default/ordered' is deterministic", "worker_id", dense(OK)
    ),
    *bad_gradient(
        "matrix",
        "expected a client_id, got an empty one",
        "request_id.client_id",
        dense(OK),
        request_id=identity(1, ""),
    ),
    *bad_gradient("nobody", "no accumulator 'default/nobody'", "accumulator.name", dense(OK), code=NOT_FOUND),
    *bad_gradient("", "expected the name of an accumulator", "accumulator.name", dense(OK)),
]


def used_differently(**fields: Any) -> Bad:
    request = Apply()
    request.CopyFrom(USED)
    request.MergeFrom(Apply(**fields))
    return Bad(
        "ApplyGradient", request, "expected the same content in every call with request_id somebody:7", "request_id"
    )


def used_with(part: accumulator_pb2.ComponentGradient) -> Bad:
    request = Apply()
    request.CopyFrom(USED)
    request.gradient[0].CopyFrom(part)
    return Bad("ApplyGradient", request, "expected the same content", "request_id")


USED_IDS = [
    used_differently(local_step=6),
    used_differently(weight=2.0),
    used_differently(worker_id="x"),
    used_differently(gradient=[dense(OK)]),
    used_with(dense(tensor(np.ones((2, 3))))),
    used_with(dense_of(shape=[3, 2])),
    used_with(dense_of(dtype=tensor_pb2.DATA_TYPE_INT32)),
    used_with(dense({**OK, "shape": [2, 3]}, "x")),
    used_with(sparse([0], (1,))),
    Bad(
        "TakeGradient",
        Take(accumulator=ref("stepped"), request_id=identity(7), num_required=1),
        "expected the same content",
        "request_id",
    ),
    Bad(
        "PushPull",
        PushPull(
            accumulator=ref("stepped"),
            request_id=identity(7),
            local_step=5,
            gradient=[dense(OK)],
            worker_id="w",
            num_required=1,
        ),
        "expected the same content",
        "request_id",
    ),
]

PLACEMENT: Any = {"num_required": 1, "placement": tensor_pb2.Placement(mode=99)}


def lease(seconds: int, nanos: int = 0) -> Any:
    return {"num_required": 1, "placement": tensor_pb2.Placement(lease=Duration(seconds=seconds, nanos=nanos))}


def bad_wait(message: str, field: str, **fields: Any) -> list[Bad]:
    """Returns a request that must be refused, as all that wait."""
    only_num_required = set(fields) == {"num_required"}
    take = Take(accumulator=ref("begun"), **fields)
    push = PushPull(accumulator=ref("begun"), gradient=[dense(OK)], **fields)
    bad = [Bad("TakeGradient", take, message, field), Bad("PushPull", push, message, field)]
    if not only_num_required:
        rest = {name: value for name, value in fields.items() if name != "num_required"}
        bad.append(Bad("ReadAverage", Read(accumulator=ref("begun"), **rest), message, field))
    return bad


BAD_WAITS = [
    *bad_wait("Argument num_required must be positive, but was 0", "num_required", num_required=0),
    *bad_wait("Argument num_required must be positive, but was -1", "num_required", num_required=-1),
    *bad_wait(f"must be positive, but was {-(1 << 31)}", "num_required", num_required=-(1 << 31)),
    *bad_wait("expected a known placement mode, got 99", "placement.mode", **PLACEMENT),
    *bad_wait("expected a positive lease, got 0 s", "placement.lease", **lease(0)),
    *bad_wait("expected a positive lease, got -1 s", "placement.lease", **lease(-1)),
    *bad_wait("expected a positive lease, got -9.22337e+18 s", "placement.lease", **lease(INT64_MIN)),
    *bad_wait("expected a timeout of at least 0, got -1 s", "timeout", num_required=1, timeout=Duration(seconds=-1)),
    *bad_wait("expected a timeout of at least 0", "timeout", num_required=1, timeout=Duration(nanos=-1)),
    *bad_wait("expected a timeout of at least 0", "timeout", num_required=1, timeout=Duration(seconds=INT64_MIN)),
    Bad(
        "TakeGradient",
        Take(accumulator=ref("begun"), num_required=1, request_id=identity(1, "")),
        "expected a client_id, got an empty one",
        "request_id.client_id",
    ),
    Bad(
        "TakeGradient",
        Take(accumulator=ref("begun"), num_required=(1 << 31) - 1, timeout=Duration()),
        "accumulator 'default/begun' did not get the 2147483647 gradients required within 0 s: 1 gradient is in",
        code=DEADLINE,
    ),
    Bad(
        "ReadAverage",
        Read(accumulator=ref("begun"), step=INT64_MAX, timeout=Duration()),
        f"the average of step {INT64_MAX} of accumulator 'default/begun' did not come within 0 s: 1 gradient is in",
        code=DEADLINE,
    ),
    *(
        Bad(
            "ReadAverage",
            Read(accumulator=ref("begun"), step=step),
            f"no average of step {step} is kept",
            "step",
            OUT_OF_RANGE,
        )
        for step in (0, -1, INT64_MIN)
    ),
    Bad("ReadAverage", Read(accumulator=ref("stepped"), step=5), "those kept (1)", "step", OUT_OF_RANGE),
]

NAMED = {
    "GetAccumulator": messages_pb2.GetAccumulatorRequest,
    "DeleteAccumulator": messages_pb2.DeleteAccumulatorRequest,
    "GetNumAccumulated": messages_pb2.GetNumAccumulatedRequest,
    "SetGlobalStep": messages_pb2.SetGlobalStepRequest,
    "TakeGradient": Take,
    "ReadAverage": Read,
}
UNKNOWN = [
    bad
    for method, request in NAMED.items()
    for bad in (
        Bad(method, request(), "expected the name of an accumulator, got an empty one", "accumulator.name"),
        Bad(method, request(accumulator=ref("")), "expected the name of an accumulator", "accumulator.name"),
        *(
            ()
            if method == "DeleteAccumulator"  # To delete what is not there is no error.
            else (
                Bad(
                    method, request(accumulator=ref("no")), "no accumulator 'default/no'", "accumulator.name", NOT_FOUND
                ),
                Bad(
                    method,
                    request(accumulator=ref("matrix", container="c")),
                    "no accumulator 'c/matrix'",
                    "accumulator.name",
                    NOT_FOUND,
                ),
                Bad(
                    method,
                    request(accumulator=ref("matrix", incarnation="earlier")),
                    "accumulator 'default/matrix' was deleted; the one of that name now is another",
                    "accumulator.incarnation",
                    NOT_FOUND,
                ),
                Bad(method, request(accumulator=ref("n" * MIB)), "no accumulator", "accumulator.name", NOT_FOUND),
                Bad(method, request(accumulator=ref("🙂" * 9999)), "no accumulator", "accumulator.name", NOT_FOUND),
            )
        ),
    )
]


def bad_spec(message: str, field: str, *components: Any, name: str = "new", **fields: Any) -> Bad:
    code = fields.pop("code", INVALID)
    return Bad(
        "CreateAccumulator", Create(accumulator=ref(name), spec=spec(*components, **fields)), message, field, code
    )


FIRST = "spec.components[0]"
BAD_SPECS = [
    bad_spec("expected the name of an accumulator", "accumulator.name", component(), name=""),
    bad_spec("expected at least one component, got none", "spec.components"),
    Bad("CreateAccumulator", Create(accumulator=ref("new")), "expected at least one component", "spec.components"),
    bad_spec(
        "expected distinct component names, got 'a' twice", "spec.components[1].name", component("a"), component("a")
    ),
    bad_spec("expected a name for each of several components", f"{FIRST}.name", component(), component("a")),
    bad_spec("expected a name for each of several components", "spec.components[1].name", component("a"), component()),
    bad_spec("expected a known DataType, got 0", f"{FIRST}.dtype", component(dtype=0)),
    bad_spec("expected a known DataType, got 99", f"{FIRST}.dtype", component(dtype=99)),
    *(
        bad_spec(
            "expected a dtype out of float16, bfloat16, float32, float64, got", f"{FIRST}.dtype", component(dtype=dtype)
        )
        for dtype in set(tensor_pb2.DataType.values()) - {0, 1, 2, 3, 4}
    ),
    bad_spec("expected dimensions of at least -1, got -2", f"{FIRST}.shape.dims", component(dims=[3, -2])),
    bad_spec(
        f"expected dimensions of at least -1, got {INT64_MIN}", f"{FIRST}.shape.dims", component(dims=[INT64_MIN])
    ),
    bad_spec(
        "expected no dims with unknown_rank, got [1]",
        f"{FIRST}.shape.dims",
        accumulator_pb2.ComponentSpec(dtype=F32, shape=accumulator_pb2.PartialShape(unknown_rank=True, dims=[1])),
    ),
    bad_spec("expected a known layout, got 99", f"{FIRST}.layout", component(layout=99)),
    bad_spec("expected a known reduction, got 99", "spec.reduction", component(), reduction=99),
    bad_spec("expected a known reduction, got -1", "spec.reduction", component(), reduction=-1),
    bad_spec("expected a known DataType, got 99", "spec.accumulate_dtype", component(), accumulate_dtype=99),
    bad_spec(
        "expected an accumulate_dtype that holds every float32, got float16",
        "spec.accumulate_dtype",
        component(),
        accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT16,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every bfloat16, got float16",
        "spec.accumulate_dtype",
        component(dtype=tensor_pb2.DATA_TYPE_BFLOAT16),
        accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT16,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every float64, got float32",
        "spec.accumulate_dtype",
        component("a"),
        component("b", dtype=tensor_pb2.DATA_TYPE_FLOAT64),
        accumulate_dtype=F32,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every float32, got complex64",
        "spec.accumulate_dtype",
        component(),
        accumulate_dtype=tensor_pb2.DATA_TYPE_COMPLEX64,
    ),
    bad_spec("expected keep_averages of at least 1, got -1", "spec.keep_averages", component(), keep_averages=-1),
    bad_spec("expected keep_averages of at least 1", "spec.keep_averages", component(), keep_averages=-(1 << 31)),
]


def other_spec(name: str, message: str, *components: Any, **fields: Any) -> Bad:
    return bad_spec(message, "spec", *components, name=name, code=grpc.StatusCode.ALREADY_EXISTS, **fields)


TAKEN_NAMES = [
    other_spec("matrix", "exists with another spec: reduction is MEAN, not SUM", component(dims=[-1, 3]), reduction=2),
    other_spec("matrix", "dtype of component '' is float32, not float64", component(dims=[-1, 3], dtype=4)),
    other_spec("matrix", "shape of component '' is [?,3], not [2,3]", component(dims=[2, 3])),
    other_spec("matrix", "shape of component '' is [?,3], not <unknown>", component()),
    other_spec("matrix", "shape of component '' is [?,3], not []", component(dims=[])),
    other_spec("matrix", "layout of component '' is DENSE, not SPARSE", component(dims=[-1, 3], **SPARSE)),
    other_spec("matrix", "deterministic is False, not True", component(dims=[-1, 3]), deterministic=True),
    other_spec("matrix", "keep_averages is 1, not 2", component(dims=[-1, 3]), keep_averages=2),
    other_spec("matrix", "accumulate_dtype is None, not float64", component(dims=[-1, 3]), accumulate_dtype=4),
    other_spec("wide", "accumulate_dtype is float64, not None", component()),
    other_spec("matrix", "components are [''], not ['x']", component("x", dims=[-1, 3])),
    other_spec("model", "components are ['w', 'e'], not ['w']", component("w", dims=[2])),
    other_spec(
        "matrix",
        "accumulator 'default/matrix' exists with another spec: reduction is MEAN, not SUM; keep_averages is 1, not 9; "
        "dtype of component '' is float32, not float16; shape of component '' is [?,3], not []; "
        "layout of component '' is DENSE, not SPARSE",
        component(dims=[], dtype=1, **SPARSE),
        reduction=2,
        keep_averages=9,
    ),
]


def token(text: str | bytes) -> str:
    return base64.urlsafe_b64encode(text.encode() if isinstance(text, str) else text).decode()


def bad_page(message: str, field: str, *, for_accumulators: bool = True, **fields: Any) -> list[Bad]:
    bad = [Bad("ListTensors", tensor_messages_pb2.ListTensorsRequest(**fields), message, field)]
    if for_accumulators:
        bad.append(Bad("ListAccumulators", messages_pb2.ListAccumulatorsRequest(**fields), message, field))
    return bad


TOKEN = "expected the next_page_token of an earlier page, got "
BAD_PAGES = [
    *bad_page("expected a page_size of at least 0, got -1", "page_size", page_size=-1),
    *bad_page("expected a page_size of at least 0", "page_size", page_size=-(1 << 31)),
    *bad_page(f"{TOKEN}'x'", "page_token", page_token="x"),
    *bad_page(f"{TOKEN}'===='", "page_token", page_token="===="),
    *bad_page(f"{TOKEN}'a b c'", "page_token", page_token="a b c"),
    *bad_page(f"{TOKEN}'ééé'", "page_token", page_token="ééé"),
    *bad_page(TOKEN, "page_token", page_token=token(b"\xff\xfe")),
    *bad_page(TOKEN, "page_token", page_token="\0" * 1000),
    *bad_page(TOKEN, "page_token", page_token="x" * (MIB + 1)),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("name")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("-1")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("1.5")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("²")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("9" * 5000)),
]

BAD_READS = [
    Bad("GetTensors", tensor_messages_pb2.GetTensorsRequest(), "expected at least one handle, got none", "handles"),
    Bad(
        "GetTensors",
        tensor_messages_pb2.GetTensorsRequest(handles=["nobody"], release=True),
        "no tensor with the handle 'nobody'",
        "handles[0]",
        NOT_FOUND,
    ),
    Bad("GetTensors", tensor_messages_pb2.GetTensorsRequest(handles=[""]), "the handle ''", "handles[0]", NOT_FOUND),
    Bad(
        "GetTensors",
        tensor_messages_pb2.GetTensorsRequest(handles=["\0" * MIB] * 2),
        "no tensor with the handle",
        "handles[0]",
        NOT_FOUND,
    ),
]

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
        hold.wait(30)

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
        hold.wait(30)

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
    mine = {"accumulator": ref(name), "request_id": identity(1)}
    assert raw.fail("ApplyGradient", Apply(**mine, gradient=[dense(zeros(7))])).code is INVALID
    answer = raw.call("ApplyGradient", Apply(**mine, gradient=[dense(OK)]))
    assert (answer.duplicate, answer.num_accumulated) == (False, 1)
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


@pytest.mark.usefixtures("unchanged")
def test_an_id_with_another_dense_shape_is_another_content(raw: RawCalls, name: str) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=SPECS["any rows"]))
    mine = {"accumulator": ref(name), "request_id": identity(1)}
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


def test_values_that_are_no_numbers_are_numbers(client: gradserve.Client) -> None:
    acc = client.conditional_accumulator("float32", (4,))
    acc.apply_grad([math.nan, math.inf, math.inf, 3e38])
    acc.apply_grad([1, 1, -math.inf, 3e38])
    assert np.array_equal(acc.take_grad(2), [math.nan, math.inf, math.nan, math.inf], equal_nan=True)
    rows = client.sparse_conditional_accumulator("float16")
    rows.apply_grad([0, 2], [math.nan, -math.inf])
    rows.apply_grad([2, 3], [1, 65504])
    assert np.array_equal(rows.take_grad(2).values, [math.nan, -math.inf, 65504], equal_nan=True)


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_extreme_weights(client: gradserve.Client, dtype: str, weight: float) -> None:
    acc = client.gradient_accumulator({"d": gradserve.DenseSpec(dtype), "s": gradserve.SparseSpec(dtype)})
    for _ in range(3):
        slices = gradserve.IndexedSlices(np.ones((1, 2)), np.array([1]))
        acc.apply_grad({"d": [1.0, 0.0], "s": slices}, weight=weight)
    average = acc.take_grad(3)
    assert average.num_gradients == 3
    assert average["d"].shape == (2,)


@pytest.mark.parametrize("step", [INT64_MIN, -1, INT64_MAX - 1, INT64_MAX])
def test_extreme_steps(client: gradserve.Client, name: str, step: int) -> None:
    acc = client.conditional_accumulator("float32", (), name, keep_averages=3)
    acc.set_global_step(step)
    assert acc.info().global_step == step
    for local_step in (INT64_MIN, INT64_MAX, step):
        outcome = acc.apply_grad(1, local_step).outcome
        assert outcome is (gradserve.ACCEPTED if local_step >= step else gradserve.STALE)
    for _ in range(3):
        acc.apply_grad(1, INT64_MAX)
        assert acc.take_grad(1) == 1
        info = acc.info()
        assert INT64_MIN <= info.global_step <= INT64_MAX
        assert acc.read_average(info.global_step) == 1
    assert len(set(acc.info().kept_steps)) == 3
    acc.set_global_step(0)
    assert acc.apply_grad(1).outcome is gradserve.ACCEPTED
    acc.delete()


@pytest.mark.parametrize(
    "dims", [[INT64_MAX], [INT64_MAX] * 3, [-1] * 10_000, [0] * 10_000], ids=lambda dims: f"{len(dims)}x{dims[0]}"
)
@pytest.mark.parametrize("layout", [accumulator_pb2.LAYOUT_DENSE, accumulator_pb2.LAYOUT_SPARSE])
@pytest.mark.usefixtures("unchanged")
def test_absurd_shapes_of_accumulators(raw: RawCalls, name: str, dims: list[int], layout: Any) -> None:
    made = raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=spec(component(dims=dims, layout=layout))))
    assert list(made.info.spec.components[0].shape.dims) == dims
    part = dense(OK) if layout == accumulator_pb2.LAYOUT_DENSE else sparse([0, 1], (2, 3), [2, 3])
    failure = raw.fail("ApplyGradient", Apply(accumulator=ref(name), gradient=[part]))
    assert (failure.code, failure.message[:14]) == (INVALID, "Shape mismatch")
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("deadline", [None, 1e6])
@pytest.mark.parametrize("seconds", [315_576_000_000, INT64_MAX])
def test_absurd_times(raw: RawCalls, name: str, seconds: int, deadline: float | None) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=SPECS["any"]))
    long = Duration(seconds=seconds, nanos=(1 << 31) - 1)
    keep = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP, lease=long)
    fields: Any = {"accumulator": ref(name), "timeout": long, "placement": keep}
    reader = raw.start("ReadAverage", Read(**fields, step=1), timeout=deadline)
    taker = raw.start("TakeGradient", Take(**fields, num_required=2), timeout=deadline)
    eventually(lambda: state(raw)[2].num_waiters, lambda waiters: waiters == 2)
    raw.call("ApplyGradient", Apply(accumulator=ref(name), gradient=[dense(OK)]))
    raw.call("PushPull", PushPull(**fields, num_required=1, gradient=[dense(OK)]), timeout=deadline)
    handles = [
        reply_class.FromString(call.result()).average.components[0].dense.handle
        for reply_class, call in (
            (messages_pb2.ReadAverageResponse, reader),
            (messages_pb2.TakeGradientResponse, taker),
        )
    ]
    (stored,) = raw.call("PutTensors", header([1], lease=long), chunk(4)).tensors
    listed = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest()).tensors
    assert {*handles, stored.handle} <= {each.handle for each in listed}
    assert all(each.lease_remaining.seconds <= 86_400 for each in listed)
    everything = tensor_messages_pb2.DeleteTensorsRequest(handles=[each.handle for each in listed])
    assert raw.call("DeleteTensors", everything).num_deleted == 4
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


def million(message: Message) -> bytes:
    """Returns the bytes of a message, a million times."""
    return message.SerializeToString() * 10**6


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("method", "first", "more", "message", "field"),
    [
        (
            "CreateAccumulator",
            Create(accumulator=ref("new")),
            million(Create(spec=spec(component()))),
            "expected at most 65536 components, got 1000000",
            "spec.components",
        ),
        (
            "ApplyGradient",
            Apply(accumulator=ref("model"), request_id=identity(1)),
            million(Apply(gradient=[accumulator_pb2.ComponentGradient()])),
            "expected at most 65536 components, got 1000000",
            "gradient",
        ),
        (
            "PushPull",
            PushPull(accumulator=ref("model"), num_required=1),
            million(PushPull(gradient=[dense({"handle": "x"})])),
            "expected at most 65536 components, got 1000000",
            "gradient",
        ),
        (
            "GetTensors",
            tensor_messages_pb2.GetTensorsRequest(release=True),
            million(tensor_messages_pb2.GetTensorsRequest(handles=["x"])),
            "expected at most 131072 handles, got 1000000",
            "handles",
        ),
        (
            "PutTensors",
            header([0]),
            million(header([1])),
            "expected at most 131072 tensors, got 1000001",
            "header.tensors",
        ),
        (
            "ApplyGradient",
            Apply(accumulator=ref("any")),
            million(Apply(gradient=[dense({"handle": "x"})])),
            "expected at most 65536 components, got 1000000",
            "gradient",
        ),
    ],
)
def test_a_million_of_something(
    server_address: str, raw: RawCalls, method: str, first: Message, more: bytes, message: str, field: str
) -> None:
    """Refused, and others are answered meanwhile or soon after."""
    request = first.SerializeToString() + more
    assert len(request) < 16 * MIB
    call = raw.start(method, request)
    with gradserve.connect(server_address, timeout=5) as other:
        other.server_info()
    with pytest.raises(grpc.RpcError) as raised:
        list(call) if METHODS[method].server_streaming else call.result()
    failure = failure_of(raised.value)
    assert (failure.code, failure.message, failure.field) == (INVALID, message, field)


@pytest.mark.usefixtures("unchanged")
def test_a_message_that_is_too_long(raw: RawCalls) -> None:
    gradient = dense({"dtype": F32, "shape": [4 * MIB + 1], "content": bytes(16 * MIB + 4)})
    failure = raw.fail("ApplyGradient", Apply(accumulator=ref("any"), gradient=[gradient]))
    assert failure.code is EXHAUSTED
    assert re.search(rf"Received message larger than max \(\d+ vs\. {16 * MIB}\)", failure.message)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        bytes(range(256)) * 50,
    ],
    ids=["nothing", "HTTP/1.1", "zeros", "ones", "noise"],
)
def test_what_is_not_even_grpc(server_address: str, noise: bytes) -> None:
    host, _, port = server_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except TimeoutError:
            raise
        except OSError:
            pass  # The server may hang up at any point.


TINY = LimitsConfig(
    max_message_bytes=ByteSize(2000),
    max_bytes=ByteSize(100),
    max_handles=3,
    max_accumulators=2,
    max_waiters=1,
    max_clients=2,
    id_window=2,
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[RawCalls]:
    """A server with next to no room, with one accumulator of any tensor."""
    with LocalServer(ServerConfig(limits=TINY)) as local, RawCalls(local.address) as calls:
        calls.call("CreateAccumulator", Create(accumulator=ref("a"), spec=SPECS["any"]))
        yield calls


@pytest.fixture
def tiny_unchanged(tiny: RawCalls) -> Iterator[None]:
    before = state(tiny)
    yield
    eventually(lambda: state(tiny), before.__eq__)


@pytest.mark.usefixtures("tiny_unchanged")
class TestLimits:
    def test_accumulators(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("b"), spec=SPECS["any"]))
        failure = tiny.fail("CreateAccumulator", Create(accumulator=ref("c"), spec=SPECS["any"]))
        assert failure == Failure(EXHAUSTED, "too many accumulators: 1 asked for, 2 in use, 2 allowed", None)
        assert not tiny.call("CreateAccumulator", Create(accumulator=ref("b"), spec=SPECS["any"])).created
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("b")))
        assert tiny.call("CreateAccumulator", Create(accumulator=ref("c"), spec=SPECS["any"])).created
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("c")))

    def test_handles(self, tiny: RawCalls) -> None:
        stored = tiny.call("PutTensors", header([0], [0])).tensors
        failure = tiny.fail("PutTensors", header([0], [0]))
        assert failure == Failure(EXHAUSTED, "too many tensor handles: 2 asked for, 2 in use, 3 allowed", None)
        handles = [each.handle for each in stored]
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))

    def test_bytes_of_tensors(self, tiny: RawCalls) -> None:
        (stored,) = tiny.call("PutTensors", header([15]), chunk(60)).tensors
        failure = tiny.fail("PutTensors", header([4], [7]), chunk(44))
        text = "too many bytes of tensor memory: 44 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[stored.handle]))

    @pytest.mark.parametrize("method", ["ApplyGradient", "PushPull"])
    def test_bytes_of_accumulators(self, tiny: RawCalls, method: str) -> None:
        (stored,) = tiny.call("PutTensors", header([15]), chunk(60)).tensors
        fields: Any = {"accumulator": ref("a"), "gradient": [dense(zeros(11))]}
        request = Apply(**fields) if method == "ApplyGradient" else PushPull(**fields, num_required=1)
        failure = tiny.fail(method, request)
        text = "too many bytes of tensor memory: 44 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[stored.handle]))

    def test_bytes_of_kept_averages(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("k"), spec=SPECS["any"]))
        fields: Any = {"accumulator": ref("k"), "gradient": [dense(zeros(15))], "request_id": identity(1)}
        push = PushPull(**fields, num_required=1, placement=tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP))
        failure = tiny.fail("PushPull", push)
        text = "too many bytes of tensor memory: 60 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        # It was computed: the same call finds it, once there is room or it is asked for inline.
        push.placement.mode = tensor_pb2.Placement.MODE_INLINE
        answer = tiny.call("PushPull", push)
        assert answer.duplicate
        assert list(answer.average.components[0].dense.shape) == [15]
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("k")))

    def test_waiters(self, tiny: RawCalls) -> None:
        first = tiny.start("TakeGradient", Take(accumulator=ref("a"), num_required=1))
        eventually(lambda: state(tiny)[2].num_waiters, lambda waiters: waiters == 1)
        for method, request in (
            ("TakeGradient", Take(accumulator=ref("a"), num_required=1)),
            ("ReadAverage", Read(accumulator=ref("a"))),
            ("PushPull", PushPull(accumulator=ref("a"), num_required=1, gradient=[dense(zeros(1))])),
        ):
            failure = tiny.fail(method, request)
            assert failure == Failure(EXHAUSTED, "too many waiting calls: 1 asked for, 1 in use, 1 allowed", None)
        first.cancel()
        eventually(lambda: state(tiny)[2].num_waiters, lambda waiters: waiters == 0)

    def test_clients_and_ids(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("i"), spec=SPECS["scalar"]))

        def apply(sequence: int, client_id: str) -> Apply:
            request_id = identity(sequence, client_id)
            return Apply(accumulator=ref("i"), gradient=[dense(zeros())], request_id=request_id)

        for sequence in (1, 2, 3, (1 << 64) - 1):
            assert not tiny.call("ApplyGradient", apply(sequence, "x")).duplicate
        for old in (0, 1, 2):
            failure = tiny.fail("ApplyGradient", apply(old, "x"))
            assert (failure.code, failure.field) == (ABORTED, "request_id.sequence")
            assert f"request_id x:{old} is older than the 2 latest that are remembered" in failure.message
        assert tiny.call("ApplyGradient", apply(3, "x")).duplicate
        tiny.call("ApplyGradient", apply(1, "y"))
        failure = tiny.fail("ApplyGradient", apply(1, "z"))
        assert failure.code is EXHAUSTED
        assert failure.message == "too many clients use request ids here: 2 allowed"
        counted = messages_pb2.GetNumAccumulatedRequest(accumulator=ref("i"))
        assert tiny.call("GetNumAccumulated", counted).num_accumulated == 5
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("i")))

    def test_message_bytes(self, tiny: RawCalls) -> None:
        failure = tiny.fail("ApplyGradient", Apply(accumulator=ref("a"), gradient=[dense(zeros(500))]))
        assert failure.code is EXHAUSTED
        assert re.search(r"Received message larger than max \(20\d\d vs\. 2000\)", failure.message)
