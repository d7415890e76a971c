"""Compiles the kernels of GRUBlockCell on the host. Importing this imports Numba, which takes half a second."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gradserve_server.devices.host import intrinsics
from gradserve_server.devices.host.half_precision import BFLOAT16_BITS, FLOAT16_BITS
from gradserve_server.devices.host.jit import compile_kernel
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from gradserve_server.ops.gru.cpu import loops
from gradserve_server.ops.gru.cpu.kernels import Conversions, Kernel, Kernels

_TYPES: dict[np.dtype[Any], Any] = {
    FLOAT32: types.float32,
    FLOAT64: types.float64,
    FLOAT16: FLOAT16_BITS,
    BFLOAT16: BFLOAT16_BITS,
}
_COUNTERS = types.int64[::1]


def compile_kernels(dtype: np.dtype[Any], stop: Callable[[], bool]) -> Kernels | None:
    """Compiles the kernels for float32 or float64, or takes them from the cache; returns nothing once `stop()`."""
    element, size = _TYPES[dtype], types.int64
    given, result = _read_only(element), element[::1]
    signatures: dict[Kernel, tuple[Any, ...]] = {
        loops.gates: (*[given] * 4, *[size] * 3, *[result] * 3, _COUNTERS),
        loops.state: (*[given] * 5, *[size] * 3, *[result] * 2, _COUNTERS),
        loops.gradient_of_state: (*[given] * 4, *[size] * 3, *[result] * 2, _COUNTERS),
        loops.gradient_of_reset: (*[given] * 3, *[size] * 4, result, _COUNTERS),
        loops.gradient_of_inputs: (*[given] * 5, *[size] * 4, *[result] * 2, _COUNTERS),
    }
    compiled: dict[str, Kernel] = {}
    for function, signature in signatures.items():
        if stop():
            return None
        compiled[function.__name__] = compile_kernel(function, signature)
    return Kernels(wait_until_done=_compile_wait_until_done(), **compiled)


def compile_conversions(dtype: np.dtype[Any], stop: Callable[[], bool]) -> Conversions | None:
    """Compiles the kernels between float16 or bfloat16 and float32, or takes them from the cache; see above."""
    if stop():
        return None
    element = _TYPES[dtype]
    return Conversions(
        bits=np.dtype(str(element)),
        wait_until_done=_compile_wait_until_done(),
        to_float32=_compile_conversion(element, types.float32),
        from_float32=_compile_conversion(types.float32, element),
    )


def _compile_wait_until_done() -> Kernel:
    return compile_kernel(intrinsics.wait_until_done, (_COUNTERS, types.int64))


def _compile_conversion(source: Any, target: Any) -> Kernel:
    return compile_kernel(loops.convert, (_read_only(source), types.int64, target[::1], _COUNTERS))


def _read_only(element: Any) -> Any:
    return types.Array(element, 1, "C", readonly=True)
