"""LayerNorm and LayerNormGrad on the host, by the kernels in `cpu_loops`.

T and U are the dtypes of `spec`; `intrinsics` says how kernels take elements of T. x is a matrix with one row per
group; a chunk is a few groups. Sums are in U within a block and in float64 over blocks. Blocks, chunks and their
partial sums are the same on every processor and for any number of threads; docs/layer_norm.md has the resulting error
bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import (
    ELEMENTS,
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    flat,
)
from gradserve_server.ops.layer_norm.reference import layer_norm, layer_norm_grad
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, widened


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for one T; see the functions `forward` and `gradient`."""

    forward: Kernel
    gradient: Kernel


LAYER_NORM = KernelTable(
    what="LayerNorm",
    package=__package__,
    kernels=Kernels,
    types={
        dtype: {"T": ELEMENTS[dtype], "U": ELEMENTS[widened(dtype)]} for dtype in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
    },
    declared={
        "forward": Declared(
            "cpu_loops.forward", "const {T}[], const {U}[], const {U}[], float64, int64, {U}[], {U}[], {T}[]"
        ),
        "gradient": Declared(
            "cpu_loops.gradient",
            "const {T}[], const {T}[], const {U}[], const {U}[], const {U}[], int64, float64[3], {T}[], {U}[], {U}[]",
        ),
    },
)


@dataclass(frozen=True)
class PartKernels(ChunkedKernels):
    """The kernels for one T that cut long groups into parts; see the functions of the same names."""

    moments_of_parts: Kernel
    normalize_parts: Kernel
    sums_of_parts: Kernel
    gradient_of_parts: Kernel


LONG_GROUPS = KernelTable(
    what="LayerNorm of long groups",
    package=__package__,
    kernels=PartKernels,
    types=LAYER_NORM.types,
    declared={
        "moments_of_parts": Declared(
            "cpu_loops.moments_of_parts", "const {T}[], float64, int64, float64[3], float64[], {U}[], {U}[]"
        ),
        "normalize_parts": Declared(
            "cpu_loops.normalize_parts",
            "const {T}[], const {U}[], const {U}[], const float64[], const {U}[], int64, {T}[]",
        ),
        "sums_of_parts": Declared(
            "cpu_loops.sums_of_parts",
            "const {T}[], const {T}[], const {U}[], const {U}[], const {U}[], int64, float64[3], float64[2]",
        ),
        "gradient_of_parts": Declared(
            "cpu_loops.gradient_of_parts",
            "const {T}[], const {T}[], const {U}[], const {U}[], const {U}[], const float64[2], int64, "
            "{T}[], {U}[], {U}[]",
        ),
    },
)

_FEW_GROUPS = 16
"""The least number of groups of which long ones are not cut into parts, as there are enough for all threads."""

BLOCK_ELEMENTS = 1024
"""Parts consist of whole blocks of `moments.BLOCK_ELEMENTS`, which only kernels import."""

_CHUNK_ELEMENTS = 1 << 15
"""About ten microseconds of work: for less, no other thread is woken up."""

_MIN_GRADIENT_GROUPS = 32
"""The minimum keeps the sums for scale and offset, which every chunk has, to an eighth of the size of x."""


class CpuLayerNorm:
    """Computes LayerNorm with kernels whose groups all threads share. Safe to use from several threads.

    NumPy computes the calls of a dtype until its kernels are prepared, and where they cannot be compiled.
    """

    def __init__(
        self,
        device: CpuDevice,
        parallel: ForkJoin,
        *,
        chunk_elements: int = _CHUNK_ELEMENTS,
        min_gradient_groups: int = _MIN_GRADIENT_GROUPS,
    ) -> None:
        """Takes the device that allocates outputs, and the threads that share large computations.

        Args:
            device: The device.
            parallel: The threads.
            chunk_elements: The number of elements of a chunk, which one thread computes, rounded to whole groups.
            min_gradient_groups: The least number of groups of a chunk of the gradient.
        """
        self._device = device
        self._parallel = parallel
        self._chunk_elements = chunk_elements
        self._min_gradient_groups = min_gradient_groups
        self._kernels = PreparedKernels(LAYER_NORM, loader=parallel.loader)
        self._part_kernels = PreparedKernels(LONG_GROUPS, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()` is true."""
        self._kernels.prepare(stop)
        self._part_kernels.prepare(stop)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes LayerNorm."""
        kernels = self._kernels.get(inputs.x.dtype)
        with np.errstate(all="ignore"):
            if kernels is None or inputs.x.size == 0:
                return layer_norm(np, inputs, attributes, geometry)
            return self._run_forward(kernels, inputs, attributes, geometry)

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        """Computes LayerNormGrad."""
        kernels = self._kernels.get(inputs.x.dtype)
        with np.errstate(all="ignore"):
            if kernels is None or inputs.x.size == 0:
                return layer_norm_grad(np, inputs, geometry)
            return self._run_gradient(kernels, inputs, geometry)

    def _run_forward(
        self, kernels: Kernels, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry
    ) -> ForwardOutputs:
        y = self._device.empty(inputs.x.shape, inputs.x.dtype)
        mean, rstd = (self._device.empty(geometry.stats_shape, inputs.scale.dtype) for _ in range(2))
        part_elements = _whole_blocks(self._chunk_elements)
        if geometry.groups < _FEW_GROUPS and geometry.size > part_elements:
            parts = self._part_kernels.get(inputs.x.dtype)
            if parts is not None:
                outputs = ForwardOutputs(y, mean, rstd)
                self._run_forward_parts(parts, inputs, attributes, geometry, part_elements, outputs)
                return outputs
        chunk_groups = max(self._chunk_elements // geometry.size, 1)
        arrays = (flat(inputs.x), flat(inputs.scale), flat(inputs.offset))
        arguments = (*arrays, attributes.epsilon, chunk_groups, flat(mean), flat(rstd), flat(y))
        kernels.run(self._parallel, kernels.forward, arguments, -(-geometry.groups // chunk_groups))
        return ForwardOutputs(y, mean, rstd)

    def _run_gradient(self, kernels: Kernels, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        x_backprop = self._device.empty(inputs.x.shape, inputs.x.dtype)
        scale_backprop, offset_backprop = (self._device.empty(inputs.scale.shape, inputs.scale.dtype) for _ in range(2))
        chunk_groups = max(self._chunk_elements // geometry.size, self._min_gradient_groups)
        num_chunks = -(-geometry.groups // chunk_groups)
        part_elements = _whole_blocks(self._chunk_elements // geometry.groups)
        if -(-geometry.size // part_elements) > num_chunks:
            parts = self._part_kernels.get(inputs.x.dtype)
            if parts is not None:
                outputs = GradOutputs(x_backprop, scale_backprop, offset_backprop)
                self._run_gradient_parts(parts, inputs, geometry, part_elements, outputs)
                return outputs
        partial = np.empty((num_chunks, 2, geometry.size))
        arrays = [flat(each) for each in (inputs.y_backprop, inputs.x, inputs.scale, inputs.mean, inputs.rstd)]
        results = [flat(each) for each in (x_backprop, scale_backprop, offset_backprop)]
        kernels.run(self._parallel, kernels.gradient, (*arrays, chunk_groups, partial, *results), num_chunks)
        return GradOutputs(x_backprop, scale_backprop, offset_backprop)

    def _run_forward_parts(
        self,
        kernels: PartKernels,
        inputs: ForwardInputs,
        attributes: ForwardAttributes,
        geometry: Geometry,
        part_elements: int,
        outputs: ForwardOutputs,
    ) -> None:
        num_parts = -(-geometry.size // part_elements)
        x, scale, offset = (flat(each) for each in (inputs.x, inputs.scale, inputs.offset))
        y, mean, rstd = (flat(each) for each in (outputs.y, outputs.mean, outputs.rstd))
        partial, wide_mean = np.empty((geometry.groups, num_parts, 2)), np.empty(geometry.groups)
        num_chunks = geometry.groups * num_parts
        moments = (x, attributes.epsilon, part_elements, partial, wide_mean, mean, rstd)
        kernels.run(self._parallel, kernels.moments_of_parts, moments, num_chunks)
        normalizing = (x, scale, offset, wide_mean, rstd, part_elements, y)
        kernels.run(self._parallel, kernels.normalize_parts, normalizing, num_chunks)

    def _run_gradient_parts(
        self,
        kernels: PartKernels,
        inputs: GradInputs,
        geometry: Geometry,
        part_elements: int,
        outputs: GradOutputs,
    ) -> None:
        num_parts = -(-geometry.size // part_elements)
        arrays = [flat(each) for each in (inputs.y_backprop, inputs.x, inputs.scale, inputs.mean, inputs.rstd)]
        results = [flat(each) for each in (outputs.x_backprop, outputs.scale_backprop, outputs.offset_backprop)]
        partial, means = np.empty((geometry.groups, num_parts, 2)), np.empty((geometry.groups, 2))
        sums = (*arrays, part_elements, partial, means)
        kernels.run(self._parallel, kernels.sums_of_parts, sums, geometry.groups * num_parts)
        kernels.run(self._parallel, kernels.gradient_of_parts, (*arrays, means, part_elements, *results), num_parts)


def _whole_blocks(num_elements: int) -> int:
    """Returns the number of elements of a part, about as many as asked for."""
    return max(num_elements // BLOCK_ELEMENTS, 1) * BLOCK_ELEMENTS
