"""The CUDA kernels of GRUBlockCell: their programs and arguments. Nothing here needs a GPU."""

import functools
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.kernels import ELEMENT_THREADS, ELEMENTS, Struct, element_launch, instance
from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

ARITHMETIC: tuple[np.dtype[Any], ...] = (FLOAT32, FLOAT64)
CONVERTED: tuple[np.dtype[Any], ...] = (BFLOAT16, FLOAT16)
"""ARITHMETIC has the dtypes that kernels compute with, CONVERTED those that are converted to float32 and back."""

ARGUMENTS = {
    "gates": Struct(("ru_of_x", "ru_of_h", "b_ru", "h_prev", "r", "u", "h_prevr"), ("rows", "cells")),
    "state": Struct(("c_of_x", "c_of_h", "b_c", "h_prev", "u", "c", "h"), ("rows", "cells")),
    "gradient_of_state": Struct(
        ("h_prev", "r", "u", "c", "d_h", "d_c_bar", "d_r_bar_u_bar", "h_prevr"),
        ("rows", "cells"),
    ),
    "gradient_of_reset": Struct(("d_x_h_prevr", "h_prev", "r", "d_r_bar_u_bar"), ("rows", "inputs", "cells")),
    "gradient_of_inputs": Struct(
        ("d_x_h_prev", "d_x_h_prevr", "r", "u", "d_h", "d_x", "d_h_prev"),
        ("rows", "inputs", "cells"),
    ),
    "to_float32": Struct(("source", "target"), ("count",)),
    "from_float32": Struct(("source", "target"), ("count",)),
}
"""The arguments, by kernel."""
CONVERSIONS = ("to_float32", "from_float32")


def kernel_name(kernel: str, dtype: np.dtype[Any]) -> str:
    """The name of an instance of a template."""
    return f"gru_{kernel}_{dtype.name}"


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """The kernels that compute with a dtype; for a dtype of 16 bits, the kernels that convert it."""
    kernels = [kernel for kernel in ARGUMENTS if (kernel in CONVERSIONS) == (dtype in CONVERTED)]
    instances = {kernel_name(kernel, dtype): _instance(kernel, dtype) for kernel in kernels}
    parts = [*element_sources(), (resources.files(__package__) / "gru.cu").read_text(encoding="utf-8")]
    return Program(f"GRU {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def launch(kernel: str, dtype: np.dtype[Any], count: int, limits: Limits) -> Launch:
    """The launch of a kernel for `count` elements, at least one."""
    return element_launch(kernel_name(kernel, dtype), count, limits)


def _instance(kernel: str, dtype: np.dtype[Any]) -> str:
    types, template = ELEMENTS[dtype], kernel
    if kernel in CONVERSIONS:
        template = "convert"
        types = f"{types}, float" if kernel == "to_float32" else f"float, {types}"
    struct = f"{template.title().replace('_', '')}Arguments<{types}>"
    return instance(kernel_name(kernel, dtype), str(ELEMENT_THREADS), struct, f"{template}<{types}>")
