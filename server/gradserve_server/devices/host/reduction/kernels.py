"""The kernels of element-wise arithmetic on lists of arrays, and their signatures.

G is the dtype of gradients, S the dtype of their sums; `intrinsics` says how G is passed. All threads share the chunks.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gradserve_server.devices.host.kernel_table import ELEMENTS, ChunkedKernels, Declared, Kernel, KernelTable


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for one G; see the functions of `loops` and `finite_loops`."""

    scale: Kernel
    add_scaled: Kernel
    divide: Kernel
    divide_in_place: Kernel
    add_and_divide: Kernel
    add_and_divide_in_place: Kernel
    find_non_finite: Kernel


_SUMS = {np.float32: "float32", ml_dtypes.bfloat16: "float32", np.float16: "float32", np.float64: "float64"}

REDUCTION = KernelTable(
    what="sums of gradients",
    package=__package__,
    kernels=Kernels,
    types={np.dtype(dtype): {"G": ELEMENTS[np.dtype(dtype)], "S": name} for dtype, name in _SUMS.items()},
    declared={
        "scale": Declared("loops.scale", "int64[2], int64[], {S}, const {G}[], {S}[]"),
        "add_scaled": Declared("loops.add_scaled", "int64[2], int64[], {S}, {S}[], const {G}[]"),
        "divide": Declared("loops.divide", "int64[2], int64[], {S}, const {S}[], {G}[]"),
        "divide_in_place": Declared("loops.divide_in_place", "int64[2], int64[], {S}, {S}[]"),
        "add_and_divide": Declared(
            "loops.add_and_divide", "int64[2], int64[], {S}, {S}, const {S}[], const {G}[], {G}[]"
        ),
        "add_and_divide_in_place": Declared(
            "loops.add_and_divide_in_place", "int64[2], int64[], {S}, {S}, {S}[], const {G}[]"
        ),
        "find_non_finite": Declared("finite_loops.find_non_finite", "int64[2], int64[], {S}, const {G}[], int64[2]"),
    },
    contract=False,
)
