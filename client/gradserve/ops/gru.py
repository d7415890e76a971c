"""GRUBlockCell and its gradient."""

from dataclasses import replace
from typing import Annotated, Generic, NamedTuple

from gradserve.ops.declaration import FLOAT32, Attribute, Input, Op, SameAs
from gradserve.printing import abbreviated
from gradserve.results import TensorT_co
from gradserve.v1 import gru_block_cell_messages_pb2 as gru_messages_pb2

_LIKE_X = SameAs("x")


@abbreviated
class GRUBlockCellOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCell; see `RawOps.GRUBlockCell`."""

    r: Annotated[TensorT_co, "T, shape [B, H]: the reset gate."]
    u: Annotated[TensorT_co, "T, shape [B, H]: the update gate."]
    c: Annotated[TensorT_co, "T, shape [B, H]: the candidate state."]
    h: Annotated[TensorT_co, "T, shape [B, H]: the new state."]


@abbreviated
class GRUBlockCellGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad, as TensorFlow has them; see `RawOps.GRUBlockCellGrad`."""

    d_x: TensorT_co
    d_h_prev: TensorT_co
    d_c_bar: TensorT_co
    d_r_bar_u_bar: TensorT_co


@abbreviated
class GRUBlockCellAllGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad with `weight_gradients`; see `RawOps.GRUBlockCellGrad`."""

    d_x: Annotated[TensorT_co, "T, shape [B, I]."]
    d_h_prev: Annotated[TensorT_co, "T, shape [B, H]."]
    d_c_bar: Annotated[TensorT_co, "T, shape [B, H]: with respect to the argument of tanh."]
    d_r_bar_u_bar: Annotated[TensorT_co, "T, shape [B, 2H]: with respect to the argument of the sigmoid."]
    d_w_ru: Annotated[TensorT_co, "T, shape [I + H, 2H]."]
    d_w_c: Annotated[TensorT_co, "T, shape [I + H, H]."]
    d_b_ru: Annotated[TensorT_co, "T, shape [2H]."]
    d_b_c: Annotated[TensorT_co, "T, shape [H]."]


GRU_BLOCK_CELL = Op(
    name="GRUBlockCell",
    request=gru_messages_pb2.GRUBlockCellRequest,
    summary="Computes one step of a GRU for a batch.",
    text="""
        [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
        c      = tanh([x, h_prev r] . w_c + b_c)
        h      = u h_prev + (1 - u) c

    In the following, B is the batch, I the size of the input, H the size of the cell, and T the dtype of x and of
    all other tensors: float16, bfloat16, float32 or float64.
    """,
    arguments=(
        Input("x", FLOAT32, "T, shape [B, I]."),
        Input("h_prev", _LIKE_X, "T, shape [B, H]: the previous state."),
        Input("w_ru", _LIKE_X, "T, shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u."),
        Input("w_c", _LIKE_X, "T, shape [I + H, H]: rows as in w_ru."),
        Input("b_ru", _LIKE_X, "T, shape [2H]: for r, then for u."),
        Input("b_c", _LIKE_X, "T, shape [H]."),
    ),
    outputs=GRUBlockCellOutputs,
)

_BIASES = ("b_ru", "b_c")

GRU_BLOCK_CELL_GRAD = Op(
    name="GRUBlockCellGrad",
    request=gru_messages_pb2.GRUBlockCellGradRequest,
    summary="Computes the gradients of GRUBlockCell.",
    text="B, I, H and T are as in `GRUBlockCell`.",
    arguments=(
        *(
            replace(each, doc=f"As in the forward call{'; only its shape counts' * (each.name in _BIASES)}.")
            for each in GRU_BLOCK_CELL.inputs
        ),
        Input("r", _LIKE_X, "T, shape [B, H]: the forward call's r."),
        Input("u", _LIKE_X, "T, shape [B, H]: the forward call's u."),
        Input("c", _LIKE_X, "T, shape [B, H]: the forward call's c."),
        Input("d_h", _LIKE_X, "T, shape [B, H]: the gradient with respect to h."),
        Attribute(
            "weight_gradients",
            "bool",
            "Whether to compute the last four outputs, which TensorFlow's op does not have.",
            False,
        ),
    ),
    outputs=GRUBlockCellGradOutputs,
    more_outputs=("weight_gradients", GRUBlockCellAllGradOutputs),
)
