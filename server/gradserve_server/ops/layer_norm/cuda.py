"""LayerNorm and LayerNormGrad on a GPU: the CUDA programs and their launches. Importing this needs no GPU."""

import functools
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.programs import (
    ELEMENT_THREADS,
    ELEMENTS,
    KernelDevice,
    Launch,
    Limits,
    Program,
    Programs,
    Struct,
    element_launch,
    element_sources,
    instance,
)
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors.spec import MOST_USUAL_FIRST, widened

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


class CudaLayerNorm:
    """Computes LayerNorm with a few threads for each group; sums over groups have a block for some columns.

    Sums have a fixed order, so results depend only on the inputs and the kind of GPU. Safe to use from several threads.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._programs = Programs(device, program, MOST_USUAL_FIRST)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes LayerNorm, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        dtype = inputs.x.dtype
        mean, rstd = (self._device.empty(geometry.stats_shape, inputs.scale.dtype) for _ in range(2))
        outputs = ForwardOutputs(self._device.empty(inputs.x.shape, dtype), mean, rstd)
        if geometry.groups > 0:
            addresses = self._addresses(inputs, outputs)
            self._launch_for_groups("forward", dtype, geometry, addresses, {"epsilon": attributes.epsilon})
        return outputs

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        """Computes LayerNormGrad, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        dtype, limits = inputs.x.dtype, self._device.limits
        scale_backprop, offset_backprop = (self._device.empty(inputs.scale.shape, inputs.scale.dtype) for _ in range(2))
        outputs = GradOutputs(self._device.empty(inputs.x.shape, dtype), scale_backprop, offset_backprop)
        if geometry.size == 0:
            return outputs
        addresses = self._addresses(inputs, outputs)
        if geometry.groups > 0:
            self._launch_for_groups("x_gradient", dtype, geometry, addresses, {})
        addresses["partial_sums"] = self._device.scratch(partial_bytes(geometry, limits))
        sums, gradient = param_launches(geometry, dtype, limits)
        numbers = {
            "groups": geometry.groups,
            "size": geometry.size,
            "splits": num_splits(geometry, limits),
        }
        self._launch("param_sums", dtype, sums, addresses, numbers)
        self._launch("param_gradient", dtype, gradient, addresses, numbers)
        return outputs

    def _addresses(self, inputs: Any, outputs: Any) -> dict[str, int]:
        return {name: self._device.address(array) for name, array in (vars(inputs) | vars(outputs)).items()}

    def _launch_for_groups(
        self, kernel: str, dtype: np.dtype[Any], geometry: Geometry, addresses: dict[str, int], floats: dict[str, float]
    ) -> None:
        width = vector_width(geometry, dtype, [*addresses.values()])
        launch = group_launch(kernel, geometry, dtype, width, self._device.limits)
        numbers = {"groups": geometry.groups, "size": geometry.size}
        numbers["threads_of_group"] = threads_of_group(geometry)
        self._launch(kernel, dtype, launch, addresses, numbers | floats)

    def _launch(
        self,
        kernel: str,
        dtype: np.dtype[Any],
        launch: Launch,
        addresses: dict[str, int],
        numbers: dict[str, Any],
    ) -> None:
        """Starts a kernel with the `addresses` and `numbers` that it needs."""
        self._programs[dtype].launch(launch, ARGUMENTS[kernel].of(addresses, numbers))
