"""Bad calls of LayerNorm and LayerNormGrad."""

import math
from typing import Any

import grpc
import ml_dtypes
import numpy as np

from gradserve_protocol.v1 import layer_norm_messages_pb2 as layer_norm_pb2
from gradserve_protocol.v1 import tensor_pb2
from tests.bad_input.requests import EXHAUSTED, F32, INVALID, MIB, NOT_FOUND, Bad, tensor, zeros

X, SCALE, STATS = zeros(2, 3, 4), zeros(3, 4), zeros(2)
FORWARD: dict[str, Any] = {"x": X, "scale": SCALE, "offset": SCALE}
GRADIENT: dict[str, Any] = {"y_backprop": X, "x": X, "scale": SCALE, "mean": STATS, "rstd": STATS}


def forward(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("LayerNorm", layer_norm_pb2.LayerNormRequest(**{**FORWARD, **fields}), message, field, code)


def gradient(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("LayerNormGrad", layer_norm_pb2.LayerNormGradRequest(**{**GRADIENT, **fields}), message, field, code)


def both(message: str, field: str, **fields: Any) -> list[Bad]:
    return [forward(message, field, **fields), gradient(message, field, **fields)]


BAD_LAYER_NORMS = [
    # Attributes
    *[
        forward(f"expected a finite epsilon of at least 0, got {epsilon}", "epsilon", epsilon=epsilon)
        for epsilon in (-1.0, -1e-300, math.nan, math.inf, -math.inf)
    ],
    # Dtypes
    *both(
        "expected x of float16, bfloat16, float32 or float64, got int32", "x", x=tensor(np.zeros((2, 3, 4)), np.int32)
    ),
    *both(
        "expected scale of float32 for x of float32, got float16", "scale", scale=tensor(np.zeros((3, 4)), np.float16)
    ),
    forward(
        "expected scale of float32 for x of bfloat16, got bfloat16",
        "scale",
        x=tensor(np.zeros((2, 3, 4)), ml_dtypes.bfloat16),
        scale=tensor(np.zeros((3, 4)), ml_dtypes.bfloat16),
    ),
    forward("expected offset of float32 for x of float32, got float64", "offset", offset=tensor([0], np.float64)),
    gradient("expected y_backprop of float32 for x of float32, got int64", "y_backprop", y_backprop=tensor(0, int)),
    gradient("expected mean of float32 for x of float32, got float64", "mean", mean=tensor([0, 0], np.float64)),
    gradient("expected rstd of float32 for x of float32, got bool", "rstd", rstd=tensor([0, 0], np.bool_)),
    # Shapes
    *both("expected scale with at least one dimension, got shape []", "scale", scale=zeros()),
    *both("scale of a shape that the shape of x, [2,3,4], ends with, got [2,3]", "scale", scale=zeros(2, 3)),
    *both("scale of a shape that the shape of x, [4], ends with, got [3,4]", "scale", x=zeros(4)),
    *both("scale of a shape that the shape of x, [], ends with, got [3,4]", "scale", x=zeros()),
    *both("scale of a shape that the shape of x, [2,3,4], ends with, got [0]", "scale", scale=zeros(0)),
    forward("expected offset of shape [3,4], that of scale, got [12]", "offset", offset=zeros(12)),
    gradient("expected y_backprop of shape [2,3,4], that of x, got [2,4,3]", "y_backprop", y_backprop=zeros(2, 4, 3)),
    gradient("expected mean of shape [2], that of x without the dimensions of scale, got []", "mean", mean=zeros()),
    gradient("expected rstd of shape [2], that of x without the dimensions of scale", "rstd", rstd=zeros(2, 1, 1)),
    # Tensors
    *[
        call("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()})
        for call, names in ((forward, FORWARD), (gradient, GRADIENT))
        for name in names
    ],
    *[
        call("no tensor with the handle 'nobody'", f"{name}.handle", NOT_FOUND, **{name: {"handle": "nobody"}})
        for call, names in ((forward, FORWARD), (gradient, GRADIENT))
        for name in names
    ],
    gradient(
        "expected 8 bytes for shape [2] of float32, got 7",
        "rstd.content",
        rstd=tensor_pb2.Tensor(dtype=F32, shape=[2], content=bytes(7)),
    ),
    # Placements
    forward("expected a known placement mode, got 9", "placement.mode", placement={"mode": 9}),
    gradient("expected a positive lease, got -1 s", "placement.lease", placement={"lease": {"seconds": -1}}),
    # 2 MiB of inputs, 18 MiB of outputs.
    forward(
        f"at most {16 * MIB} come inline",
        "placement.mode",
        EXHAUSTED,
        x=tensor(np.zeros((2 * MIB + MIB // 4, 1)), np.float16),
        scale=zeros(1),
        offset=zeros(1),
        placement={"mode": tensor_pb2.Placement.MODE_INLINE},
    ),
]
"""What is wrong with a call."""
