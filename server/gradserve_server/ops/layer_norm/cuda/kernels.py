"""The CUDA kernels of LayerNorm: programs, arguments and launches. Nothing here needs a GPU."""

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.kernels import ELEMENT_THREADS, ELEMENTS, Struct, element_launch, instance
from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources
from gradserve_server.ops.dtypes import widened
from gradserve_server.ops.layer_norm.spec import Geometry

ARGUMENTS = {
    "forward": Struct(
        ("x", "scale", "offset", "y", "mean", "rstd"), ("groups", "size", "threads_of_group"), ("epsilon",)
    ),
    "x_gradient": Struct(
        ("y_backprop", "x", "scale", "mean", "rstd", "x_backprop"), ("groups", "size", "threads_of_group")
    ),
    "param_sums": Struct(("y_backprop", "x", "mean", "rstd", "partial_sums"), ("groups", "size")),
    "param_gradient": Struct(("partial_sums", "scale_backprop", "offset_backprop"), ("splits", "size")),
}
"""The arguments of each kernel."""

GROUP_KERNELS = {"forward": 2, "x_gradient": 2}
"""The number of sums of a thread, for the kernels with threads for each group; they exist for vectors and elements."""

MAX_THREADS = 512
"""The maximum number of threads of a group."""

COLUMNS = 32
"""The number of columns of a block of `param_sums`: what a warp reads lies side by side."""

_VECTOR_BYTES = 16
_ELEMENTS_PER_THREAD = 8
"""The elements of one batch of loads. With more threads for a group, each has less to do while it waits."""
_BLOCKS_PER_MULTIPROCESSOR = 8
_SUM_BYTES = 8


def kernel_name(kernel: str, dtype: np.dtype[Any], width: int | None = None) -> str:
    """Returns the name of an instance of a template; `width` is for `GROUP_KERNELS`."""
    return f"layer_norm_{kernel}_{dtype.name}" + (f"_by_{width}" if width else "")


def vector_width(geometry: Geometry, dtype: np.dtype[Any], addresses: Sequence[int]) -> int:
    """Returns how many elements a thread loads at a time: a full vector if all rows are aligned, else one."""
    width = _VECTOR_BYTES // dtype.itemsize
    is_aligned = geometry.size % width == 0 and all(address % _VECTOR_BYTES == 0 for address in addresses)
    return width if is_aligned else 1


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """Returns the program with the kernels for a dtype."""
    widths = (1, _VECTOR_BYTES // dtype.itemsize)
    variants = [(kernel, dtype, width) for kernel in GROUP_KERNELS for width in widths]
    instances = {kernel_name(*variant): _group_instance(*variant) for variant in variants}
    element, param = ELEMENTS[dtype], ELEMENTS[widened(dtype)]
    for kernel, types, template in (
        ("param_sums", f"{element}, {param}", f"param_sums<{COLUMNS}>"),
        ("param_gradient", param, "param_gradient"),
    ):
        name = kernel_name(kernel, dtype)
        instances[name] = instance(name, str(ELEMENT_THREADS), f"{_struct(kernel)}<{types}>", template)
    parts = [*element_sources(), (resources.files(__package__) / "layer_norm.cu").read_text(encoding="utf-8")]
    return Program(f"layer norm {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def threads_of_group(geometry: Geometry) -> int:
    """Returns how many threads share a group, a power of two."""
    wanted = -(-geometry.size // _ELEMENTS_PER_THREAD)
    return min(1 << max(wanted - 1, 0).bit_length(), MAX_THREADS)


def group_launch(kernel: str, geometry: Geometry, dtype: np.dtype[Any], width: int, limits: Limits) -> Launch:
    """Returns the launch of one of `GROUP_KERNELS`, for at least one group."""
    of_group = threads_of_group(geometry)
    threads = max(of_group, ELEMENT_THREADS)
    blocks = min(-(-geometry.groups * of_group // threads), _BLOCKS_PER_MULTIPROCESSOR * limits.num_multiprocessors)
    return Launch(kernel_name(kernel, dtype, width), (blocks, 1), threads, GROUP_KERNELS[kernel] * threads * _SUM_BYTES)


def param_launches(geometry: Geometry, dtype: np.dtype[Any], limits: Limits) -> tuple[Launch, Launch]:
    """Returns the launches of `param_sums` and `param_gradient`, for groups of at least one element.

    Sums over groups are split among enough blocks to keep all multiprocessors busy; see `num_splits`.
    """
    tiles = -(-geometry.size // COLUMNS)
    sums = Launch(
        kernel_name("param_sums", dtype),
        (tiles, num_splits(geometry, limits)),
        ELEMENT_THREADS,
        2 * ELEMENT_THREADS * _SUM_BYTES,
    )
    return sums, element_launch(kernel_name("param_gradient", dtype), geometry.size, limits)


def num_splits(geometry: Geometry, limits: Limits) -> int:
    """Returns how many blocks of `param_sums` share a column."""
    tiles = -(-geometry.size // COLUMNS)
    wanted = -(-_BLOCKS_PER_MULTIPROCESSOR * limits.num_multiprocessors // tiles)
    groups_of_block = ELEMENT_THREADS // COLUMNS * _ELEMENTS_PER_THREAD
    return max(min(wanted, -(-geometry.groups // groups_of_block)), 1)


def partial_bytes(geometry: Geometry, limits: Limits) -> int:
    """Returns the bytes of the partial sums that `param_sums` leaves for `param_gradient`."""
    return num_splits(geometry, limits) * 2 * geometry.size * _SUM_BYTES


def _group_instance(kernel: str, dtype: np.dtype[Any], width: int) -> str:
    struct = f"{_struct(kernel)}<{ELEMENTS[dtype]}, {ELEMENTS[widened(dtype)]}>"
    return instance(kernel_name(kernel, dtype, width), str(MAX_THREADS), struct, f"{kernel}<{width}>")


def _struct(kernel: str) -> str:
    return f"{kernel.title().replace('_', '')}Arguments"
