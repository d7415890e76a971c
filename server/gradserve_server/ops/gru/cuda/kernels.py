"""The CUDA kernels of GRUBlockCell: their programs, and what they take. Nothing here needs a GPU."""

import functools
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

_TYPES = {FLOAT16: "Half", BFLOAT16: "BFloat16", FLOAT32: "float", FLOAT64: "double"}

ARITHMETIC: tuple[np.dtype[Any], ...] = (FLOAT32, FLOAT64)
CONVERTED: tuple[np.dtype[Any], ...] = (BFLOAT16, FLOAT16)
"""The dtypes that kernels compute with, and those that become float32 and back."""

ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gates": (("ru_of_x", "ru_of_h", "b_ru", "h_prev", "r", "u", "h_prevr"), ("rows", "cells")),
    "state": (("c_of_x", "c_of_h", "b_c", "h_prev", "u", "c", "h"), ("rows", "cells")),
    "gradient_of_state": (
        ("h_prev", "r", "u", "c", "d_h", "d_c_bar", "d_r_bar_u_bar", "h_prevr"),
        ("rows", "cells"),
    ),
    "gradient_of_reset": (("d_x_h_prevr", "h_prev", "r", "d_r_bar_u_bar"), ("rows", "inputs", "cells")),
    "gradient_of_inputs": (
        ("d_x_h_prev", "d_x_h_prevr", "r", "u", "d_h", "d_x", "d_h_prev"),
        ("rows", "inputs", "cells"),
    ),
    "to_float32": (("source", "target"), ("count",)),
    "from_float32": (("source", "target"), ("count",)),
}
"""By kernel, the arrays and the numbers of its struct."""
CONVERSIONS = ("to_float32", "from_float32")

_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 16
"""Twice what runs at a time: where there is more to do, threads do several elements."""


def kernel_name(kernel: str, dtype: np.dtype[Any]) -> str:
    """The name of an instance of a template."""
    return f"gru_{kernel}_{dtype.name}"


def arguments_dtype(kernel: str) -> np.dtype[Any]:
    """The struct that a kernel takes, as C++ lays it out."""
    arrays, numbers = ARGUMENTS[kernel]
    return np.dtype([*((name, np.uint64) for name in arrays), *((name, np.int64) for name in numbers)])


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """The kernels that compute with a dtype, or for one of 16 bits those that convert it."""
    kernels = [kernel for kernel in ARGUMENTS if (kernel in CONVERSIONS) == (dtype in CONVERTED)]
    instances = {kernel_name(kernel, dtype): _instance(kernel, dtype) for kernel in kernels}
    parts = [*element_sources(), (resources.files(__package__) / "gru.cu").read_text(encoding="utf-8")]
    return Program(f"GRU {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def launch(kernel: str, dtype: np.dtype[Any], count: int, limits: Limits) -> Launch:
    """The launch of a kernel for `count` elements, at least one."""
    blocks = min(-(-count // _THREADS), _BLOCKS_PER_MULTIPROCESSOR * limits.num_multiprocessors)
    return Launch(kernel_name(kernel, dtype), (blocks, 1), _THREADS, 0)


def _instance(kernel: str, dtype: np.dtype[Any]) -> str:
    types, template = _TYPES[dtype], kernel
    if kernel in CONVERSIONS:
        template = "convert"
        types = f"{types}, float" if kernel == "to_float32" else f"float, {types}"
    struct = f"{template.title().replace('_', '')}Arguments<{types}>"
    return (
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) {kernel_name(kernel, dtype)}'
        f"(const __grid_constant__ {struct} arguments) {{ {template}<{types}>(arguments); }}"
    )
