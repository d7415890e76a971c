"""The CUDA kernels of activation functions: their programs, and what they take. Nothing here needs a GPU."""

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources
from gradserve_server.ops.activation.spec import LEAKY_RELU_SLOPE, NAMES, SELU_SCALE, SELU_SCALE_ALPHA
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

_TYPES = {FLOAT16: "Half", BFLOAT16: "BFloat16", FLOAT32: "float", FLOAT64: "double"}

ARRAYS = {"forward": ("x", "out"), "gradient": ("dy", "saved", "out")}
"""By kernel, the arrays of its struct; `count` follows."""

_VECTOR_BYTES = 16
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 16
"""Twice what runs at a time: where there is more to do, threads do several vectors."""


def kernel_name(kernel: str, name: str, dtype: np.dtype[Any], width: int) -> str:
    """The name of an instance of a template, for one activation function."""
    return f"{name}_{kernel}_{dtype.name}_by_{width}"


def arguments_dtype(kernel: str) -> np.dtype[Any]:
    """The struct that a kernel takes, as C++ lays it out."""
    return np.dtype([*((name, np.uint64) for name in ARRAYS[kernel]), ("count", np.int64)])


def vector_width(dtype: np.dtype[Any], addresses: Sequence[int]) -> int:
    """How many elements a thread loads at a time: as many as fit where all arrays are aligned, else one."""
    is_aligned = all(address % _VECTOR_BYTES == 0 for address in addresses)
    return _VECTOR_BYTES // dtype.itemsize if is_aligned else 1


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """The kernels for a dtype."""
    widths = (1, _VECTOR_BYTES // dtype.itemsize)
    variants = [(kernel, name, dtype, width) for kernel in ARRAYS for name in NAMES for width in widths]
    instances = {kernel_name(*variant): _instance(*variant) for variant in variants}
    parts = [*element_sources(), _constants(), (resources.files(__package__) / "activation.cu").read_text("utf-8")]
    return Program(f"activation {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def launch(kernel: str, name: str, dtype: np.dtype[Any], width: int, count: int, limits: Limits) -> Launch:
    """The launch of a kernel for `count` elements, at least one."""
    blocks = min(-(-count // (width * _THREADS)), _BLOCKS_PER_MULTIPROCESSOR * limits.num_multiprocessors)
    return Launch(kernel_name(kernel, name, dtype, width), (blocks, 1), _THREADS, 0)


def _constants() -> str:
    numbers = {
        "LEAKY_RELU_SLOPE": LEAKY_RELU_SLOPE,
        "SELU_SCALE": SELU_SCALE,
        "SELU_SCALE_ALPHA": SELU_SCALE_ALPHA,
    }
    return "\n".join(f"constexpr double {name} = {number!r};" for name, number in numbers.items())


def _instance(kernel: str, name: str, dtype: np.dtype[Any], width: int) -> str:
    function, element = name.title().replace("_", ""), _TYPES[dtype]
    return (
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) {kernel_name(kernel, name, dtype, width)}'
        f"(const __grid_constant__ {kernel.title()}Arguments<{element}> arguments) "
        f"{{ {kernel}<{function}, {width}>(arguments); }}"
    )
