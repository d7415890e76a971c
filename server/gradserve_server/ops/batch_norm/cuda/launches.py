"""The CUDA kernels of batch normalization, and the launches that compute a call.

All functions are pure, so tests can run the launches without a GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from struct import pack_into
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.kernels import ELEMENTS, instance
from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources
from gradserve_server.ops.batch_norm.cuda.tiling import (
    MAX_THREADS,
    Tiling,
    blocks_per_multiprocessor,
    canonical,
    split_tiling,
    vector_width,
    vector_widths,
    whole_tilings,
)
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    Geometry,
    GradAttributes,
)
from gradserve_server.ops.dtypes import widened

Operation: TypeAlias = Literal["forward", "gradient"]

KERNELS: dict[Operation, tuple[str, ...]] = {
    "forward": ("forward_moments", "forward_normalize", "forward_whole"),
    "gradient": ("gradient_sums", "gradient_apply", "gradient_whole", "gradient_frozen"),
}
"""The templates, by operation; each exists for every dtype, vector width and number of lanes."""

LAYOUT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "channels",
            "inner",
            "positions",
            "row_positions",
            "row_stride",
            "step",
            "step_remainder",
            "step_offset",
            "wrap_offset",
            "column_bits",
        )
    ]
)
INPUTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("x", "scale", "offset", "mean", "variance"),
    "gradient": ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2"),
}
"""The inputs that kernels read, by operation, with their names in spec.py."""
OUTPUTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"),
    "gradient": ("x_backprop", "scale_backprop", "offset_backprop"),
}
"""The outputs that kernels write, by operation."""
_SCRATCH = ("partial_sums", "tickets")
_SCALARS: dict[Operation, tuple[str, ...]] = {
    "forward": ("epsilon", "exponential_avg_factor", "bessel_correction", "is_training"),
    "gradient": ("epsilon", "inverse_count"),
}
_SUMS: dict[Operation, tuple[int, int]] = {"forward": (2, 1), "gradient": (2, 0)}
"""The number of sums that a thread has for each lane, and of others."""
_TENSORS: dict[Operation, int] = {"forward": 1, "gradient": 2}
"""The number of tensors that the kernels of an operation read."""


@dataclass(frozen=True)
class LaunchPlan:
    """The launches that compute one call.

    Attributes:
        operation: The operation, whose program has the kernels.
        launches: The launches, one after another.
        arguments: The argument of every launch, a struct as in `arguments_dtype`, without its addresses.
        num_partial_sums: The size of the scratch memory `partial_sums`, in elements of U.
        num_tickets: The size of `tickets`, in uint32 elements, which are 0 before and after.
    """

    operation: Operation
    launches: tuple[Launch, ...]
    arguments: bytes
    num_partial_sums: int
    num_tickets: int

    def with_addresses(self, addresses: Sequence[int]) -> NDArray[Any]:
        """Returns the struct, as an array of one element, with the addresses of inputs, outputs and scratch memory."""
        struct = bytearray(self.arguments)
        pack_into(f"={len(addresses)}Q", struct, 0, *addresses)
        return np.frombuffer(struct, np.void(len(struct)).dtype)


def arguments_dtype(operation: Operation, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The struct that kernels take, in the layout of C++."""
    pointers = [(name, np.uint64) for name in (*INPUTS[operation], *OUTPUTS[operation], *_SCRATCH)]
    scalars = [(name, widened(dtype)) for name in _SCALARS[operation]]
    return np.dtype([*pointers, ("layout", LAYOUT), *scalars], align=True)


def shapes(dtype: np.dtype[Any]) -> tuple[tuple[int, int], ...]:
    """All pairs of a vector's width and its lanes."""
    return tuple((width, lanes) for width in vector_widths(dtype.itemsize) for lanes in dict.fromkeys((width, 1)))


def kernel_name(kernel: str, dtype: np.dtype[Any], width: int, lanes: int) -> str:
    """The name of an instance of a template."""
    return f"{kernel}_{dtype.name}_{width}_{lanes}"


@functools.cache
def source_parts(operation: Operation) -> tuple[str, ...]:
    """The files of a program: the shared ones, and the templates of the kernels."""
    folder = resources.files(__package__)
    own = [(folder / f"{name}.cu").read_text(encoding="utf-8") for name in ("tile", operation)]
    return (*element_sources(), *own)


def instances(operation: Operation, dtype: np.dtype[Any]) -> dict[str, str]:
    """The definition of every kernel, by name."""
    element = ELEMENTS[dtype]
    struct = f"{operation.capitalize()}Arguments<Param<{element}>>"
    definitions = {}
    for kernel in KERNELS[operation]:
        for width, lanes in shapes(dtype):
            name = kernel_name(kernel, dtype, width, lanes)
            bounds = f"{MAX_THREADS}, {blocks_per_multiprocessor(width, dtype.itemsize)}"
            definitions[name] = instance(name, bounds, struct, f"{kernel}<{element}, {width}, {lanes}>")
    return definitions


@functools.cache
def program(operation: Operation, dtype: np.dtype[Any]) -> Program:
    """All kernels of an operation for one dtype."""
    definitions = instances(operation, dtype)
    source = "\n".join([*source_parts(operation), *definitions.values()])
    return Program(f"batch_norm {operation} {dtype.name}", source, tuple(definitions))


def plan_forward(
    geometry: Geometry, dtype: np.dtype[Any], attributes: ForwardAttributes, is_aligned: bool, limits: Limits
) -> LaunchPlan:
    """Plans FusedBatchNorm; `is_aligned` if all addresses are multiples of a vector's size."""
    kernels = ("forward_moments", "forward_normalize") if attributes.is_training else ("forward_normalize",)
    scalars = {
        "epsilon": attributes.epsilon,
        "exponential_avg_factor": attributes.exponential_avg_factor,
        "bessel_correction": geometry.count / max(geometry.count - 1, 1),
        "is_training": float(attributes.is_training),
    }
    return _plan("forward", kernels, scalars, geometry, dtype, is_aligned, limits)


def plan_gradient(
    geometry: Geometry, dtype: np.dtype[Any], attributes: GradAttributes, is_aligned: bool, limits: Limits
) -> LaunchPlan:
    """Plans FusedBatchNormGrad; `is_aligned` if all addresses are multiples of a vector's size."""
    kernels = ("gradient_sums", "gradient_apply") if attributes.is_training else ("gradient_frozen",)
    scalars = {"epsilon": attributes.epsilon, "inverse_count": 1 / max(geometry.count, 1)}
    return _plan("gradient", kernels, scalars, geometry, dtype, is_aligned, limits)


def _plan(
    operation: Operation,
    kernels: tuple[str, ...],
    scalars: dict[str, float],
    geometry: Geometry,
    dtype: np.dtype[Any],
    is_aligned: bool,
    limits: Limits,
) -> LaunchPlan:
    geometry = canonical(geometry)
    width = vector_width(geometry, dtype.itemsize, is_aligned)
    sums_per_lane, extra_sums = _SUMS[operation]
    itemsize = widened(dtype).itemsize

    def shared_bytes(tiling: Tiling) -> int:
        return tiling.sums_bytes(sums_per_lane, extra_sums, itemsize)

    def whole_shared_bytes(tiling: Tiling) -> int:
        return shared_bytes(tiling) + tiling.kept_bytes(_TENSORS[operation], dtype.itemsize)

    # If the data for both passes of a whole tile fits into shared memory, memory is read once.
    candidates = whole_tilings(geometry, width, dtype.itemsize, limits) if len(kernels) == 2 else []
    tiling = next((tiling for tiling in candidates if whole_shared_bytes(tiling) <= limits.shared_bytes), None)
    if tiling is not None:
        kernels, num_shared_bytes = (f"{operation}_whole",), whole_shared_bytes(tiling)
    else:
        tiling = split_tiling(geometry, width, dtype.itemsize, limits)
        num_shared_bytes = shared_bytes(tiling)
    launches = tuple(
        Launch(
            kernel_name(kernel, dtype, width, tiling.lanes),
            (tiling.tiles, tiling.splits),
            tiling.threads,
            num_shared_bytes,
        )
        for kernel in kernels
    )
    arguments = np.zeros((), arguments_dtype(operation, dtype))
    arguments["layout"] = _layout(geometry, tiling)
    for name, value in scalars.items():
        arguments[name] = value
    blocks = tiling.tiles * tiling.splits
    num_partial_sums = blocks * tiling.columns * (sums_per_lane * tiling.lanes + extra_sums)
    if tiling.splits == 1:
        num_partial_sums = 0
    return LaunchPlan(operation, launches, arguments.tobytes(), num_partial_sums, tiling.tiles)


def _layout(geometry: Geometry, tiling: Tiling) -> NDArray[Any]:
    elements = tiling.width // tiling.lanes
    row_positions = max(geometry.inner // elements, 1)
    row_stride = geometry.channels * geometry.inner
    step = tiling.rows * tiling.splits
    rows, remainder = divmod(step, row_positions)
    layout = np.zeros((), LAYOUT)
    values = {
        "channels": geometry.channels,
        "inner": geometry.inner,
        "positions": tiling.positions,
        "row_positions": row_positions,
        "row_stride": row_stride,
        "step": step,
        "step_remainder": remainder,
        "step_offset": rows * row_stride + remainder * elements,
        "wrap_offset": row_stride - row_positions * elements,
        "column_bits": tiling.columns.bit_length() - 1,
    }
    for name, value in values.items():
        layout[name] = value
    return layout
