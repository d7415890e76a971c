"""Bad calls of gradient ops."""

from typing import Any

import grpc
import ml_dtypes
import numpy as np

from gradserve_protocol.v1 import fused_batch_norm_messages_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import tensor_pb2
from tests.bad_input.requests import EXHAUSTED, F32, INVALID, MIB, NOT_FOUND, Bad, tensor, zeros

X = zeros(2, 3, 4, 5)
CHANNELS = zeros(5)
FORWARD: dict[str, Any] = {"x": X, "scale": CHANNELS, "offset": CHANNELS, "mean": zeros(0), "variance": zeros(0)}
GRADIENT: dict[str, Any] = {
    "y_backprop": X,
    "x": X,
    "scale": CHANNELS,
    "reserve_space_1": CHANNELS,
    "reserve_space_2": CHANNELS,
}
INLINE = tensor_pb2.Placement.MODE_INLINE
FORMATS = 'is not in the list of allowed values: "NHWC", "NCHW", "NDHWC", "NCDHW"'


def forward(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    request = batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, **fields})
    return Bad("FusedBatchNorm", request, message, field, code)


def gradient(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    request = batch_norm_pb2.FusedBatchNormGradRequest(**{**GRADIENT, **fields})
    return Bad("FusedBatchNormGrad", request, message, field, code)


def images(*shape: int) -> dict[str, Any]:
    return {"x": zeros(*shape), "y_backprop": zeros(*shape)}


BAD_OPS = [
    # Ranks
    forward("input must be 4 or 5-dimensional[2,3]", "x", x=zeros(2, 3)),
    forward("input must be 4 or 5-dimensional[]", "x", x=tensor(0)),
    forward("scale must be 1-dimensional[5,1]", "scale", scale=zeros(5, 1)),
    forward("offset must be 1-dimensional[]", "offset", offset=tensor(0)),
    forward("estimated_mean must be 1-dimensional[1,5]", "mean", mean=zeros(1, 5)),
    forward("estimated_variance must be 1-dimensional[0,5]", "variance", variance=zeros(0, 5)),
    gradient("input must be 4 or 5-dimensional[2,3,4]", "y_backprop", y_backprop=zeros(2, 3, 4)),
    gradient("input must be 4 or 5-dimensional[2,3,4,5,1,1]", "x", x=zeros(2, 3, 4, 5, 1, 1)),
    gradient("scale must be 1-dimensional[]", "scale", scale=tensor(0)),
    gradient("saved mean must be 1-dimensional[5,1]", "reserve_space_1", reserve_space_1=zeros(5, 1)),
    gradient("saved variance must be 1-dimensional[1,5]", "reserve_space_2", reserve_space_2=zeros(1, 5)),
    # Ranks and formats
    forward("rank 5 but is rank 4", "x", data_format="NDHWC"),
    forward("rank 4 but is rank 5", "x", x=zeros(1, 2, 3, 4, 5)),
    gradient("rank 5 but is rank 4", "x", data_format="NCDHW"),
    gradient("rank 4 but is rank 5", "x", **images(1, 2, 3, 4, 5)),
    # Numbers of channels
    forward("scale must have the same number of elements as the channels of x, got 4 and 5", "scale", scale=zeros(4)),
    forward(
        "offset must have the same number of elements as the channels of x, got 0 and 5", "offset", offset=zeros(0)
    ),
    forward("as the channels of x, got 5 and 3", "scale", data_format="NCHW"),
    forward(
        "When is_training=false, mean must have the same number of elements as the channels of x, got 0 and 5",
        "mean",
        is_training=False,
    ),
    forward(
        "When is_training=false, variance must have the same number of elements as the channels of x, got 4 and 5",
        "variance",
        is_training=False,
        mean=CHANNELS,
        variance=zeros(4),
    ),
    forward(
        "When exponential_avg_factor != 1, mean must have the same number of elements as the channels of x, got 0",
        "mean",
        exponential_avg_factor=0.5,
    ),
    forward("When exponential_avg_factor != 1, variance", "variance", exponential_avg_factor=0, mean=CHANNELS),
    gradient(
        "x and y_backprop must have same shape, but x has shape [2,3,4,5]", "y_backprop", y_backprop=zeros(2, 3, 5, 4)
    ),
    gradient("scale must have the same number of elements as the channels of x, got 1 and 5", "scale", scale=zeros(1)),
    gradient("reserve_space_1 must have the same number", "reserve_space_1", reserve_space_1=zeros(6)),
    gradient("reserve_space_2 must have the same number", "reserve_space_2", reserve_space_2=zeros(0)),
    # Attributes
    forward(f"Value for attr 'data_format' of \"CHWN\" {FORMATS}", "data_format", data_format="CHWN"),
    gradient(f"Value for attr 'data_format' of \"nhwc\" {FORMATS}", "data_format", data_format="nhwc"),
    # Dtypes
    forward("Value for attr 'T' of int32", "x", x=tensor(np.zeros((1, 1, 1, 5)), np.int32)),
    forward("Value for attr 'T' of complex64", "x", x=tensor(np.zeros((1, 1, 1, 5)), np.complex64)),
    forward("Value for attr 'U' of double", "scale", scale=tensor(np.zeros(5), np.float64)),
    forward("Value for attr 'U' of float is", "scale", x=tensor(np.zeros((1, 1, 1, 5)), np.float64)),
    forward("Value for attr 'U' of bfloat16", "offset", offset=tensor(np.zeros(5), ml_dtypes.bfloat16)),
    forward("Value for attr 'U' of int64", "mean", mean=tensor(np.zeros(0), np.int64)),
    forward("Value for attr 'U' of half", "variance", variance=tensor(np.zeros(0), np.float16)),
    gradient("x must have the dtype of y_backprop, float, got half", "x", x=tensor(np.zeros((2, 3, 4, 5)), np.float16)),
    gradient("Value for attr 'U' of half", "reserve_space_1", reserve_space_1=tensor(np.zeros(5), np.float16)),
    # Tensors
    *[forward("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()}) for name in FORWARD],
    *[gradient("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()}) for name in GRADIENT],
    gradient("expected content or a handle", "reserve_space_3", reserve_space_3=tensor_pb2.Tensor()),
    *[
        call(
            "no tensor with the handle 'nobody'",
            f"{name}.handle",
            NOT_FOUND,
            **{name: tensor_pb2.Tensor(handle="nobody")},
        )
        for call, names in ((forward, FORWARD), (gradient, [*GRADIENT, "reserve_space_3"]))
        for name in names
    ],
    forward(
        "expected 480 bytes for shape [2, 3, 4, 5] of float32, got 479",
        "x.content",
        x=tensor_pb2.Tensor(dtype=F32, shape=[2, 3, 4, 5], content=bytes(479)),
    ),
    forward(
        "expected dimensions of at least 0, got -1",
        "scale.shape",
        scale=tensor_pb2.Tensor(dtype=F32, shape=[-1], content=b""),
    ),
    forward("expected a known DataType, got 0", "offset.dtype", offset=tensor_pb2.Tensor(shape=[5], content=bytes(20))),
    # Placements
    forward("expected a known placement mode, got 9", "placement.mode", placement={"mode": 9}),
    gradient("expected a positive lease, got -1 s", "placement.lease", placement={"lease": {"seconds": -1}}),
    # 12 MiB of inputs, 20 MiB of outputs.
    forward(
        f"at most {16 * MIB} come inline",
        "placement.mode",
        EXHAUSTED,
        x=tensor(np.zeros((1, 1, 2, MIB + 1)), np.float16),
        **{name: zeros(MIB + 1) for name in ("scale", "offset")},
        placement={"mode": INLINE},
    ),
]
"""Of each op, what is wrong with a call."""
