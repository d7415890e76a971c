"""Bad gradients."""

import math
from typing import Any

import ml_dtypes
import numpy as np

from gradserve_protocol.v1 import accumulator_pb2, codecs_pb2, tensor_pb2
from tests.bad_input.requests import (
    DENSE,
    F32,
    INDICES,
    INT64_MAX,
    INT64_MIN,
    NOT_FOUND,
    OK,
    SHAPE,
    USED,
    VALUES,
    Apply,
    Bad,
    PushPull,
    Take,
    bad_gradient,
    dense,
    identity,
    ref,
    sparse,
    tensor,
    zeros,
)

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
    *bad_gradient(
        "matrix",
        "only single updates of parameters may be packed",
        "gradient[0].packed",
        accumulator_pb2.ComponentGradient(packed=codecs_pb2.PackedTensor(codec="CODEC_BF16", data=zeros(2, 3))),
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
        "component 'w': no tensor with the handle 'nobody'",
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
        "component 'w': Shape mismatch: expected [2], got [3]",
        "gradient[1].dense.shape",
        sparse([0], (1, 2), name="e"),
        dense(zeros(3), "w"),
    ),
    *bad_gradient(
        "model",
        "component 'e': Shape mismatch: expected values dim 1 to be 2, got 3",
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
        "ordered", "expected a worker_id for deterministic accumulator 'default/ordered'", "worker_id", dense(OK)
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
