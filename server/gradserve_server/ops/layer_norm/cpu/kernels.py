"""The kernels of LayerNorm on the host, and their signatures.

T and U are the dtypes of `spec`; `intrinsics` says how T is passed. x is a matrix with a row for each group; a chunk is
a few groups. Sums are in U within a block and in float64 over blocks. Blocks, chunks and their partial sums are the
same on every processor and for any number of threads; docs/layer_norm.md has the resulting error bounds.
"""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ELEMENTS, ChunkedKernels, Declared, Kernel, KernelTable
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, widened


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
            "forward.forward", "const {T}[], const {U}[], const {U}[], float64, int64, {U}[], {U}[], {T}[]"
        ),
        "gradient": Declared(
            "gradient.gradient",
            "const {T}[], const {T}[], const {U}[], const {U}[], const {U}[], int64, float64[3], {T}[], {U}[], {U}[]",
        ),
    },
)
