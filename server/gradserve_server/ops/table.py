"""The served ops."""

from collections.abc import Mapping

from gradserve_server.ops.batch_norm.declaration import FUSED_BATCH_NORM, FUSED_BATCH_NORM_GRAD
from gradserve_server.ops.cudnn_rnn.canonical import (
    CUDNN_RNN_CANONICAL_TO_PARAMS,
    CUDNN_RNN_PARAMS_SIZE,
    CUDNN_RNN_PARAMS_TO_CANONICAL,
)
from gradserve_server.ops.cudnn_rnn.declaration import CUDNN_RNN, CUDNN_RNN_BACKPROP
from gradserve_server.ops.gru.declaration import GRU_BLOCK_CELL, GRU_BLOCK_CELL_GRAD
from gradserve_server.ops.layer_norm.declaration import LAYER_NORM, LAYER_NORM_GRAD
from gradserve_server.ops.operation import AnyOp

OPS: Mapping[str, AnyOp] = {
    op.name: op
    for op in (
        FUSED_BATCH_NORM,
        FUSED_BATCH_NORM_GRAD,
        GRU_BLOCK_CELL,
        GRU_BLOCK_CELL_GRAD,
        CUDNN_RNN,
        CUDNN_RNN_BACKPROP,
        CUDNN_RNN_PARAMS_SIZE,
        CUDNN_RNN_CANONICAL_TO_PARAMS,
        CUDNN_RNN_PARAMS_TO_CANONICAL,
        LAYER_NORM,
        LAYER_NORM_GRAD,
    )
}
"""The ops by name, which is the name of their RPC."""
