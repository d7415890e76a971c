"""The kernels that are compiled for other processors: some of each family, and all that read or write float16."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradserve_server.devices.host.kernels import KernelTable
from gradserve_server.devices.host.reduction import REDUCTION
from gradserve_server.ops.activation.cpu import IN_FLOAT32, IN_FLOAT64
from gradserve_server.ops.batch_norm.cpu import FUSED_BATCH_NORM
from gradserve_server.ops.cudnn_rnn.cpu.cells import CUDNN_RNN, LSTM_SCANS
from gradserve_server.ops.gru.cpu import CONVERSIONS, GRU_BLOCK_CELL
from gradserve_server.ops.layer_norm.cpu import LAYER_NORM, LONG_GROUPS
from gradserve_server.parameters.optimizers.stepping import OPTIMIZER_STEPS
from gradserve_server.parameters.reductions.exact import EXACT_SUMS
from gradserve_server.parameters.unpacking.adder import PACKED_SUMS
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32


def prepare(*, everything: bool = False) -> Iterator[str]:
    """Compiles them, or all; yields the names of families and dtypes.

    Raises:
        KernelError: One cannot be made.
    """
    wide = (FLOAT32, np.dtype(np.float64))
    # What takes longest comes last: where something is missing, that is soon found.
    some: list[tuple[str, KernelTable[Any], tuple[np.dtype[Any], ...]]] = [
        ("LayerNorm", LAYER_NORM, (FLOAT16,)),
        ("conversions", CONVERSIONS, (FLOAT16, BFLOAT16)),
        ("activation functions", IN_FLOAT32, (FLOAT32,)),
        ("sums", REDUCTION, (FLOAT16,)),
        ("packed sums", PACKED_SUMS, (FLOAT32,)),
        ("FusedBatchNorm", FUSED_BATCH_NORM, (FLOAT16,)),
    ]
    rest: list[tuple[str, KernelTable[Any], tuple[np.dtype[Any], ...]]] = [
        ("FusedBatchNorm", FUSED_BATCH_NORM, (BFLOAT16, *wide)),
        ("activation functions", IN_FLOAT64, wide[1:]),
        ("GRUBlockCell", GRU_BLOCK_CELL, wide),
        ("CudnnRNN", CUDNN_RNN, wide),
        ("CudnnRNN's lstm", LSTM_SCANS, wide),
        ("LayerNorm", LAYER_NORM, (BFLOAT16, *wide)),
        ("LayerNorm of long groups", LONG_GROUPS, (FLOAT16, BFLOAT16, *wide)),
        ("sums", REDUCTION, (BFLOAT16, *wide)),
        ("packed sums", PACKED_SUMS, wide[1:]),
        ("exact sums", EXACT_SUMS, wide[1:]),
        ("optimizers", OPTIMIZER_STEPS, wide),
    ]
    for name, table, dtypes in some + (rest if everything else []):
        for dtype in dtypes:
            assert table.compile(dtype, lambda: False) is not None
            yield f"{name} {dtype}"
