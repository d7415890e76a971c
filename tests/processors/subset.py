"""The kernels that are compiled for other processors: some of each family, and all that read or write float16."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32


def prepare(*, everything: bool = False) -> Iterator[str]:
    """Compiles them, or all; yields the names of families and dtypes.

    Raises:
        KernelError: One cannot be made.
    """
    from gradserve_server.ops.activation.cpu.compile import compile_kernels as compile_activation
    from gradserve_server.ops.batch_norm.cpu.compile import compile_kernels as compile_batch_norm
    from gradserve_server.ops.cudnn_rnn.cpu.compile import compile_kernels as compile_cudnn_rnn
    from gradserve_server.ops.gru.cpu.compile import compile_conversions
    from gradserve_server.ops.gru.cpu.compile import compile_kernels as compile_gru

    wide = (FLOAT32, np.dtype(np.float64))
    some: list[tuple[str, Callable[..., object], tuple[np.dtype[Any], ...]]] = [
        ("FusedBatchNorm", compile_batch_norm, (FLOAT16,)),
        ("conversions", compile_conversions, (FLOAT16, BFLOAT16)),
        ("activation functions", compile_activation, (FLOAT32,)),
    ]
    rest: list[tuple[str, Callable[..., object], tuple[np.dtype[Any], ...]]] = [
        ("FusedBatchNorm", compile_batch_norm, (BFLOAT16, *wide)),
        ("activation functions", compile_activation, wide[1:]),
        ("GRUBlockCell", compile_gru, wide),
        ("CudnnRNN", compile_cudnn_rnn, wide),
    ]
    for name, compile_kernels, dtypes in some + (rest if everything else []):
        for dtype in dtypes:
            assert compile_kernels(dtype, lambda: False) is not None
            yield f"{name} {dtype}"
