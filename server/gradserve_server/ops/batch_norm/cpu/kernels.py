"""The kernels of FusedBatchNorm on the host: their arguments and methods.

T and U are the dtypes in `spec`; arrays of T are passed as `intrinsics` says. x has one of two forms:

* rows of `columns` elements, each column belonging to one channel. Elements after the last whole row are the last
  columns of one more row. Loops run along rows, so they are long even with few channels.
* planes [outer, channels, inner]. Loops run along a plane.

Sums are in U within a block, and in float64 over blocks. A block is cut into the same partial sums on every processor,
and none of these is rounded more than 40 times; docs/fused_batch_norm.md has the resulting bounds of errors. Moments
are first computed from differences from an estimate of the mean. If the estimate is further than a standard deviation
from the mean, the sum of squares is too inexact, and they are computed again from the mean that was found. Moments of
blocks are combined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979.
"""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ELEMENTS, ChunkedKernels, Declared, Kernel, KernelTable
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


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
            "rows.rows_gradient",
            f"{_GRADIENT}, const {{U}}[], const {{U}}[], const {{U}}[], {_OPTIONS}, {_ROWS}, {_SUMS}",
        ),
        "rows_forward": Declared("rows.rows_forward", f"{_FORWARD}, {_ROWS}, {_MOMENTS}"),
        "planes_gradient": Declared(
            "planes.planes_gradient", f"{_GRADIENT}, const {{U}}[], {_OPTIONS}, {_PLANES}, {_SUMS}"
        ),
        "planes_forward": Declared("planes.planes_forward", f"{_FORWARD}, {_PLANES}, {_MOMENTS}"),
    },
)
