"""Compiles the kernels of activation functions on the host. Importing this imports Numba, which takes half a second."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gradserve_server.devices.host import intrinsics
from gradserve_server.devices.host.jit import compile_kernel
from gradserve_server.ops.activation.cpu import loops
from gradserve_server.ops.activation.cpu.kernels import Kernel, Kernels
from gradserve_server.ops.dtypes import FLOAT32

_COUNTERS = types.int64[::1]


def compile_kernels(dtype: np.dtype[Any], stop: Callable[[], bool]) -> Kernels | None:
    """Compiles the kernels for float32 or float64, or takes them from the cache; returns nothing once `stop()`."""
    size = types.int64
    if dtype == FLOAT32:
        given, result = _read_only(types.uint8), types.uint8[::1]
        signatures: dict[Kernel, tuple[Any, ...]] = {
            loops.forward_float32: (size, size, given, size, size, result, _COUNTERS),
            loops.gradient_float32: (size, size, given, given, size, size, result, _COUNTERS),
        }
    else:
        given, result = _read_only(types.float64), types.float64[::1]
        signatures = {
            loops.forward_float64: (size, given, size, result, _COUNTERS),
            loops.gradient_float64: (size, given, given, size, result, _COUNTERS),
        }
    compiled = [compile_kernel(intrinsics.wait_until_done, (_COUNTERS, types.int64))]
    for function, signature in signatures.items():
        if stop():
            return None
        compiled.append(compile_kernel(function, signature))
    return Kernels(*compiled)


def _read_only(element: Any) -> Any:
    return types.Array(element, 1, "C", readonly=True)
