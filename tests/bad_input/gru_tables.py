"""Bad calls of GRUBlockCell and GRUBlockCellGrad."""

from typing import Any

import grpc
import ml_dtypes
import numpy as np

from gradserve_protocol.v1 import gru_block_cell_messages_pb2 as gru_pb2
from gradserve_protocol.v1 import tensor_pb2
from tests.bad_input.requests import EXHAUSTED, F32, INVALID, MIB, NOT_FOUND, Bad, tensor, zeros

CELL: dict[str, Any] = {
    "x": zeros(2, 3),
    "h_prev": zeros(2, 4),
    "w_ru": zeros(7, 8),
    "w_c": zeros(7, 4),
    "b_ru": zeros(8),
    "b_c": zeros(4),
}
STATES = ("r", "u", "c", "d_h")
GRADIENT: dict[str, Any] = CELL | dict.fromkeys(STATES, zeros(2, 4))


def cell(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("GRUBlockCell", gru_pb2.GRUBlockCellRequest(**{**CELL, **fields}), message, field, code)


def gradient(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("GRUBlockCellGrad", gru_pb2.GRUBlockCellGradRequest(**{**GRADIENT, **fields}), message, field, code)


def both(message: str, field: str, **fields: Any) -> list[Bad]:
    return [cell(message, field, **fields), gradient(message, field, **fields)]


BAD_GRU_CALLS = [
    # Ranks and sizes, in the order of the checks
    *both("Rank of x must be 2, got 1", "x", x=zeros(3)),
    *both("Rank of h_prev must be 2, got 0", "h_prev", h_prev=tensor(0)),
    *both("h_prev.dims(0) != batch_size: 2 vs. 3", "h_prev", x=zeros(3, 3)),
    *both("Rank of w_ru_ must be 2, got 3", "w_ru", w_ru=zeros(7, 8, 1)),
    *both("w_ru.dim_size(0) != input_size + cell_size: 7 vs. 8", "w_ru", x=zeros(2, 4)),
    *both("w_ru.dim_size(1) != cell_size * 2: 4 vs. 8", "w_ru", w_ru=zeros(7, 4)),
    *both("Rank of w_c must be 2, got 1", "w_c", w_c=zeros(4)),
    *both("w_c.dim_size(0) != input_size + cell_size: 3 vs. 7", "w_c", w_c=zeros(3, 4)),
    *both("w_c.dim_size(1) != cell_size: 8 vs. 4", "w_c", w_c=zeros(7, 8)),
    *both("Rank of b_ru must be 1, got 2", "b_ru", b_ru=zeros(1, 8)),
    *both("b_ru.dim_size(0) != cell_size * 2: 4 vs. 8", "b_ru", b_ru=zeros(4)),
    *both("Rank of b_c must be 1, got 0", "b_c", b_c=tensor(0)),
    *both("b_c.dim_size(0) != cell_size: 8 vs. 4", "b_c", b_c=zeros(8)),
    gradient("Rank of r must be 2, got 1", "r", r=zeros(4)),
    gradient("Rank of w_c must be 2, got 3", "c", c=zeros(2, 4, 1)),
    gradient("u.dims(0) != batch_size: 0 vs. 2", "u", u=zeros(0, 4)),
    gradient("d_h.dims(1) != cell_size: 3 vs. 4", "d_h", d_h=zeros(2, 3)),
    *both("Rank of x must be 2, got 1", "x", x=zeros(3), b_c=zeros(8)),
    gradient("b_c.dim_size(0)", "b_c", b_c=zeros(8), r=zeros(3)),
    # Dtypes
    *both("Value for attr 'T' of int32 is not in the list", "x", x=tensor(np.zeros((2, 3)), np.int32)),
    *both("w_c must have the dtype of x, float, got half", "w_c", w_c=tensor(np.zeros((7, 4)), np.float16)),
    *both("must have the dtype of x, bfloat16, got float", "h_prev", x=tensor(np.zeros((2, 3)), ml_dtypes.bfloat16)),
    gradient("d_h must have the dtype of x, float, got double", "d_h", d_h=tensor(np.zeros((2, 4)), np.float64)),
    # Tensors
    *[cell("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()}) for name in CELL],
    *[gradient("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()}) for name in GRADIENT],
    *[
        call("no tensor with the handle 'nobody'", f"{name}.handle", NOT_FOUND, **{name: {"handle": "nobody"}})
        for call, names in ((cell, CELL), (gradient, GRADIENT))
        for name in names
    ],
    gradient(
        "expected 32 bytes for shape [2, 4] of float32, got 31",
        "u.content",
        u=tensor_pb2.Tensor(dtype=F32, shape=[2, 4], content=bytes(31)),
    ),
    # Placements
    cell("expected a known placement mode, got 9", "placement.mode", placement={"mode": 9}),
    gradient("expected a positive lease, got -1 s", "placement.lease", placement={"lease": {"seconds": -1}}),
    # 4 MiB of inputs, 16 MiB and a little of outputs.
    cell(
        f"at most {16 * MIB} come inline",
        "placement.mode",
        EXHAUSTED,
        x=zeros(MIB + 1, 0),
        h_prev=zeros(MIB + 1, 1),
        w_ru=zeros(1, 2),
        w_c=zeros(1, 1),
        b_ru=zeros(2),
        b_c=zeros(1),
        placement={"mode": tensor_pb2.Placement.MODE_INLINE},
    ),
]
"""What is wrong with a call."""
