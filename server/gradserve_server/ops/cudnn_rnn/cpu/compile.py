"""Compiles the kernels of CudnnRNN on the host. Importing this imports Numba, which takes half a second."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gradserve_server.devices.host.jit import compile_kernel
from gradserve_server.ops.cudnn_rnn.cpu.gru import gru_backward, gru_forward
from gradserve_server.ops.cudnn_rnn.cpu.kernels import Kernel, Kernels
from gradserve_server.ops.cudnn_rnn.cpu.lstm import lstm_backward, lstm_forward
from gradserve_server.ops.cudnn_rnn.cpu.vanilla import vanilla_backward, vanilla_forward
from gradserve_server.ops.cudnn_rnn.network import Mode


def compile_kernels(dtype: np.dtype[Any], stop: Callable[[], bool]) -> Kernels | None:
    """Compiles the kernels for U, or takes them from the cache; returns nothing once `stop()`."""
    element = types.float64 if dtype == np.float64 else types.float32
    given, made = types.Array(element, 1, "C", readonly=True), element[::1]
    lengths = types.Array(types.int64, 1, "C", readonly=True)
    common = (*[types.int64] * 4, *[types.boolean] * 2, *[types.int64] * 2)
    vanilla = (*common, types.boolean, lengths, given)
    gated = (*common, lengths, given)
    position = (types.int64, types.int64)
    signatures: dict[Callable[..., None], tuple[Any, ...]] = {
        lstm_forward: (*gated, made, given, made, made, made, *position),
        lstm_backward: (*gated, given, given, given, *position, made, made, made),
        gru_forward: (*gated, made, given, made, made, made, *position),
        gru_backward: (*gated, given, given, given, given, *position, made, made, made),
        vanilla_forward: (*vanilla, made, given, given, made, *position),
        vanilla_backward: (*vanilla, given, given, *position, made, made),
    }
    compiled: dict[Callable[..., None], Kernel] = {}
    for function, signature in signatures.items():
        if stop():
            return None
        compiled[function] = compile_kernel(function, signature)
    vanilla_kernels = compiled[vanilla_forward], compiled[vanilla_backward]
    kernels = {
        Mode.LSTM: (compiled[lstm_forward], compiled[lstm_backward]),
        Mode.GRU: (compiled[gru_forward], compiled[gru_backward]),
        Mode.TANH: vanilla_kernels,
        Mode.RELU: vanilla_kernels,
    }
    return Kernels(
        forward={mode: forward for mode, (forward, _) in kernels.items()},
        backward={mode: backward for mode, (_, backward) in kernels.items()},
    )
