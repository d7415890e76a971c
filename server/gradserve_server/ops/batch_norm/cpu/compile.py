"""Compiles the kernels of FusedBatchNorm on the host. Importing this imports Numba, which takes half a second."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gradserve_server.devices.host.half_precision import BFLOAT16_BITS, FLOAT16_BITS
from gradserve_server.devices.host.intrinsics import wait_until_done
from gradserve_server.devices.host.jit import compile_kernel
from gradserve_server.ops.batch_norm.cpu import planes as cpu_planes
from gradserve_server.ops.batch_norm.cpu import rows as cpu_rows
from gradserve_server.ops.batch_norm.cpu.kernels import Kernel, Kernels
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

_TYPES: dict[np.dtype[Any], tuple[Any, Any]] = {
    FLOAT16: (FLOAT16_BITS, types.float32),
    BFLOAT16: (BFLOAT16_BITS, types.float32),
    FLOAT32: (types.float32, types.float32),
    FLOAT64: (types.float64, types.float64),
}
"""T and U as the kernels take them."""


def compile_kernels(dtype: np.dtype[Any], stop: Callable[[], bool]) -> Kernels | None:
    """Compiles the kernels for T, or takes them from the cache; returns nothing once `stop()`."""
    element, param = _TYPES[dtype]
    x, u, y = _read_only(element), _read_only(param), element[::1]
    counters, sums = types.int64[::1], types.float64[::1]
    forward = (x, u, u, types.float64, types.boolean, types.boolean)
    gradient, frozen = (x, x, u, u), (u, types.float64, types.boolean)
    rows = (types.int64, types.int64, types.int64, types.float64[:, :, ::1], param[::1])
    planes = (types.int64, types.int64)
    signatures: dict[Any, tuple[Any, ...]] = {
        wait_until_done: (counters, types.int64),
        cpu_rows.rows_gradient: (*gradient, u, u, *frozen, *rows, sums, sums, param[::1], param[::1], y, counters),
        cpu_rows.rows_forward: (*forward, *rows, sums, sums, y, counters),
        cpu_planes.planes_gradient: (*gradient, u, *frozen, *planes, sums, sums, param[::1], param[::1], y, counters),
        cpu_planes.planes_forward: (*forward, *planes, sums, sums, y, counters),
    }
    compiled: dict[str, Kernel] = {}
    for function, signature in signatures.items():
        if stop():
            return None
        compiled[function.__name__] = compile_kernel(function, signature)
    return Kernels(bits=np.dtype(str(element)), **compiled)


def _read_only(element: Any) -> Any:
    return types.Array(element, 1, "C", readonly=True)
