"""FusedBatchNorm and FusedBatchNormGrad on the host, by the kernels in `cpu_loops`.

T and U are the dtypes in `spec`; `intrinsics` says how kernels take elements of T. x has one of two forms:

* rows of `columns` elements, each column belonging to one channel. Elements after the last whole row are the last
  columns of one more row. Loops run along rows, so they are long even with few channels.
* planes [outer, channels, inner]. Loops run along a plane.

Sums are in U within a block, and in float64 over blocks. A block is cut into the same partial sums on every processor,
and none of these is rounded more than 40 times; docs/fused_batch_norm_accuracy.md has the resulting bounds of errors.
Moments are first computed from differences from an estimate of the mean. If the estimate is further than a standard
deviation from the mean, the sum of squares is too inexact, and they are computed again from the mean that was found.
Moments of blocks are combined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
sample variances", 1979.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import (
    ELEMENTS,
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    aligned,
    flat,
)
from gradserve_server.ops.batch_norm.reference import fused_batch_norm, fused_batch_norm_grad
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for one T."""

    rows_forward: Kernel
    rows_gradient: Kernel
    planes_forward: Kernel
    planes_gradient: Kernel


_FORWARD = "const {T}[], const {U}[], const {U}[], float64, bool, bool"
_GRADIENT = "const {T}[], const {T}[], const {U}[], const {U}[]"
_OPTIONS = "const {U}[], float64, bool"
_ROWS = "int64, int64, int64, float64[3], {U}[]"
_PLANES = "int64, int64, {U}[2]"
_MOMENTS = "float64[], float64[], {T}[]"
_SUMS = "float64[], float64[], {U}[], {U}[], {T}[]"

FUSED_BATCH_NORM = KernelTable(
    what="FusedBatchNorm",
    package=__package__,
    kernels=Kernels,
    types={
        dtype: {"T": ELEMENTS[dtype], "U": "float64" if dtype == FLOAT64 else "float32"}
        for dtype in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
    },
    declared={
        "rows_gradient": Declared(
            "cpu_loops.rows_gradient",
            f"{_GRADIENT}, const {{U}}[], const {{U}}[], const {{U}}[], {_OPTIONS}, {_ROWS}, {_SUMS}",
        ),
        "rows_forward": Declared("cpu_loops.rows_forward", f"{_FORWARD}, {_ROWS}, {_MOMENTS}"),
        "planes_gradient": Declared(
            "cpu_loops.planes_gradient", f"{_GRADIENT}, const {{U}}[], {_OPTIONS}, {_PLANES}, {_SUMS}"
        ),
        "planes_forward": Declared("cpu_loops.planes_forward", f"{_FORWARD}, {_PLANES}, {_MOMENTS}"),
    },
)


_MIN_PLANE = 16
"""The least size of a plane: loops along smaller ones are too short, so such x is treated as rows."""

_MIN_COLUMNS = 128
"""The least length of a row: shorter rows are joined."""

_CHUNK_ELEMENTS = 1 << 16
_MIN_CHUNK_ROWS = 128
"""The least rows of a chunk. Every chunk has its own sums for each column; this keeps them below a tenth of x."""

_PLANES_CHUNK_BYTES = 1 << 20
"""The bytes of a chunk of planes. It fits into most second-level caches, where the second pass finds it."""


class CpuBatchNorm:
    """FusedBatchNorm by kernels, and the choice between them.

    Until the kernels for a dtype are ready, and if they cannot be compiled, NumPy computes its calls.
    """

    fuses_relu = True

    def __init__(self, device: CpuDevice, parallel: ForkJoin) -> None:
        self._device = device
        self._parallel = parallel
        self._kernels = PreparedKernels(FUSED_BATCH_NORM, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._kernels.prepare(stop)

    def forward(
        self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry, *, has_relu: bool = False
    ) -> ForwardOutputs:
        """Computes FusedBatchNorm, and the relu of its y if wanted."""
        kernels = self._kernels.get(inputs.x.dtype)
        with np.errstate(all="ignore"):
            if kernels is None or inputs.x.size == 0:
                return fused_batch_norm(np, inputs, attributes, geometry, has_relu=has_relu)
            return self._run_forward(kernels, inputs, attributes, geometry, has_relu)

    def gradient(
        self,
        inputs: GradInputs,
        attributes: GradAttributes,
        geometry: Geometry,
        relu_offset: NDArray[Any] | None = None,
    ) -> GradOutputs:
        """Computes FusedBatchNormGrad; with `relu_offset` the gradients of FusedBatchNorm and a relu behind it."""
        kernels = self._kernels.get(inputs.x.dtype)
        with np.errstate(all="ignore"):
            if kernels is None or inputs.x.size == 0:
                return fused_batch_norm_grad(np, inputs, attributes, geometry, relu_offset)
            return self._run_gradient(kernels, inputs, attributes, geometry, relu_offset)

    def _run_forward(
        self,
        kernels: Kernels,
        inputs: ForwardInputs,
        attributes: ForwardAttributes,
        geometry: Geometry,
        has_relu: bool,
    ) -> ForwardOutputs:
        y = self._device.empty(inputs.x.shape, inputs.x.dtype)
        if attributes.is_training:
            mean, variance = np.empty(geometry.channels), np.empty(geometry.channels)
        else:
            mean, variance = inputs.mean.astype(np.float64), inputs.variance.astype(np.float64)
        x, scale, offset = flat(inputs.x), aligned(inputs.scale), aligned(inputs.offset)
        inputs_and_options = (x, scale, offset, attributes.epsilon, attributes.is_training, has_relu)
        outputs = (mean, variance, flat(y))
        rows = _Rows.of(geometry)
        if rows:
            arguments = (*inputs_and_options, *rows.arguments(scale.dtype), *outputs)
            kernels.run(self._parallel, kernels.rows_forward, arguments, rows.num_chunks)
        else:
            planes = _Planes.of(geometry, x.nbytes)
            arguments = (*inputs_and_options, *planes.arguments(scale), *outputs)
            kernels.run(self._parallel, kernels.planes_forward, arguments, planes.num_chunks)
        return _forward_outputs(inputs, attributes, geometry, y, mean, variance)

    def _run_gradient(
        self,
        kernels: Kernels,
        inputs: GradInputs,
        attributes: GradAttributes,
        geometry: Geometry,
        relu_offset: NDArray[Any] | None,
    ) -> GradOutputs:
        x_backprop = self._device.empty(inputs.x.shape, inputs.x.dtype)
        x, dy, scale = flat(inputs.x), flat(inputs.y_backprop), aligned(inputs.scale)
        mean, variance = aligned(inputs.reserve_space_1), aligned(inputs.reserve_space_2)
        options = (variance, attributes.epsilon, attributes.is_training)
        totals, dots = np.empty((2, geometry.channels))
        scale_backprop, offset_backprop = np.empty((2, geometry.channels), scale.dtype)
        outputs = (totals, dots, scale_backprop, offset_backprop, flat(x_backprop))
        rows = _Rows.of(geometry)
        if rows:
            affine = (np.empty(0, scale.dtype),) * 2
            reduction = rows.expand(_reduction(mean, variance, attributes.epsilon))
            if relu_offset is not None:
                # The same arithmetic as in the forward kernel, for the same bits.
                multiplier = scale / np.sqrt(variance.astype(np.float64) + attributes.epsilon)
                affine = (rows.expand(multiplier.astype(scale.dtype)), rows.expand(relu_offset))
            arguments = (dy, x, scale, rows.expand(mean), reduction, *affine, *options, *rows.arguments(scale.dtype))
            kernels.run(self._parallel, kernels.rows_gradient, arguments + outputs, rows.num_chunks)
        else:
            planes = _Planes.of(geometry, x.nbytes + dy.nbytes)
            offset = np.empty(0, scale.dtype) if relu_offset is None else aligned(relu_offset)
            arguments = (dy, x, scale, mean, offset, *options, *planes.arguments(scale))
            kernels.run(self._parallel, kernels.planes_gradient, arguments + outputs, planes.num_chunks)
        nothing = np.empty(0, scale.dtype)
        return GradOutputs(x_backprop, scale_backprop, offset_backprop, nothing, nothing.copy())


@dataclass(frozen=True)
class _Rows:
    """x as rows, each of `repeats` times [channels, inner] elements."""

    repeats: int
    channels: int
    inner: int
    chunk_rows: int
    num_chunks: int

    @classmethod
    def of(cls, geometry: Geometry) -> "_Rows | None":
        """Returns None if the planes are large enough for loops."""
        outer, channels, inner = geometry.shape
        if channels == 1:
            outer, inner = geometry.count, 1
        if inner >= _MIN_PLANE:
            return None
        # A power of two, so that a row is a whole number of vectors.
        repeats = 1
        while repeats * channels * inner < _MIN_COLUMNS and 2 * repeats <= outer:
            repeats *= 2
        chunk_rows = max(_CHUNK_ELEMENTS // (repeats * channels * inner), _MIN_CHUNK_ROWS)
        return cls(repeats, channels, inner, chunk_rows, math.ceil(outer // repeats / chunk_rows))

    def expand(self, per_channel: NDArray[Any]) -> NDArray[Any]:
        """Returns a value for each column from a value for each channel."""
        return np.broadcast_to(per_channel[:, None], (self.repeats, self.channels, self.inner)).flatten()

    def arguments(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Returns the kernels' arguments for U = `dtype`."""
        columns = self.repeats * self.channels * self.inner
        shape = (self.num_chunks, 2, columns)
        memory = (np.empty(shape), np.empty(3 * columns, dtype))
        return (self.repeats, self.inner, self.chunk_rows, *memory)


@dataclass(frozen=True)
class _Planes:
    """x as planes, in chunks of the planes of `chunk_channels` channels."""

    inner: int
    chunk_channels: int
    num_chunks: int

    @classmethod
    def of(cls, geometry: Geometry, num_bytes: int) -> "_Planes":
        """Returns the planes of a call that reads `num_bytes` in all."""
        chunk_channels = max(_PLANES_CHUNK_BYTES * geometry.channels // num_bytes, 1)
        return cls(geometry.inner, chunk_channels, math.ceil(geometry.channels / chunk_channels))

    def arguments(self, scale: NDArray[Any]) -> tuple[Any, ...]:
        """Returns the kernels' arguments, with memory for what they compute once for each channel."""
        return (self.inner, self.chunk_channels, np.empty((5, *scale.shape), scale.dtype))


def _reduction(mean: NDArray[Any], variance: NDArray[Any], epsilon: float) -> NDArray[Any]:
    """Returns a power of two for each channel, by which the sums of a gradient multiply differences from the mean.

    It is about 1 / sqrt(variance + epsilon), but so small that the mean stays within the range of its dtype, U.
    """
    deviation: NDArray[Any] = variance + mean.dtype.type(epsilon)
    np.sqrt(deviation, out=deviation)
    _, exponents = np.frexp(deviation)
    _, of_mean = np.frexp(mean, deviation, None)
    np.minimum(np.negative(exponents, out=exponents), np.subtract(100, of_mean, out=of_mean), out=exponents)
    deviation[:] = 1
    np.ldexp(deviation, exponents, out=deviation)
    return deviation


def _forward_outputs(
    inputs: ForwardInputs,
    attributes: ForwardAttributes,
    geometry: Geometry,
    y: NDArray[Any],
    mean: NDArray[Any],
    variance: NDArray[Any],
) -> ForwardOutputs:
    dtype = inputs.scale.dtype
    saved_mean, saved_variance = mean.astype(dtype), variance.astype(dtype)
    batch_mean, batch_variance = mean, variance
    if attributes.is_training:
        factor = attributes.exponential_avg_factor
        batch_variance = variance * (geometry.count / max(geometry.count - 1, 1))
        if factor != 1:
            batch_mean = (1 - factor) * inputs.mean + factor * mean
            batch_variance = (1 - factor) * inputs.variance + factor * batch_variance
    else:
        saved_mean, saved_variance = np.zeros_like(saved_mean), np.zeros_like(saved_variance)
    return ForwardOutputs(
        y=y,
        batch_mean=batch_mean.astype(dtype),
        batch_variance=batch_variance.astype(dtype),
        reserve_space_1=saved_mean,
        reserve_space_2=saved_variance,
        reserve_space_3=np.zeros((), dtype),
    )
