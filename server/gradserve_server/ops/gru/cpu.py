"""GRUBlockCell and GRUBlockCellGrad on the host: BLAS for matrix products, the kernels in `cpu_loops` for the rest."""

from collections.abc import Callable
from dataclasses import dataclass, fields
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
from gradserve_server.devices.host.products import Product, Products, Summation, sum_of_rows
from gradserve_server.ops.gru.reference import gru_block_cell, gru_block_cell_grad
from gradserve_server.ops.gru.spec import (
    CellInputs,
    CellOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    Sizes,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, widened


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for float32 or float64; see `cpu_loops`."""

    cell_of_one: Kernel
    gates: Kernel
    state: Kernel
    gradient_of_state: Kernel
    gradient_of_reset: Kernel
    gradient_of_inputs: Kernel


@dataclass(frozen=True)
class Conversions(ChunkedKernels):
    """The kernels between a dtype of 16 bits and float32."""

    to_float32: Kernel
    from_float32: Kernel


def _arguments(inputs: int, sizes: int, outputs: int) -> str:
    return ", ".join(["const {T}[]"] * inputs + ["int64"] * sizes + ["{T}[]"] * outputs)


GRU_BLOCK_CELL = KernelTable(
    what="GRUBlockCell",
    package=__package__,
    kernels=Kernels,
    types={dtype: {"T": ELEMENTS[dtype]} for dtype in (FLOAT32, FLOAT64)},
    declared={
        "cell_of_one": Declared(
            "cpu_loops.cell_of_one", f"{_arguments(6, 2, 0)}, {{T}}[2], {{T}}[2], {_arguments(0, 0, 5)}"
        ),
        "gates": Declared("cpu_loops.gates", _arguments(4, 3, 3)),
        "state": Declared("cpu_loops.state", _arguments(5, 3, 2)),
        "gradient_of_state": Declared("cpu_loops.gradient_of_state", _arguments(4, 3, 2)),
        "gradient_of_reset": Declared("cpu_loops.gradient_of_reset", _arguments(3, 4, 1)),
        "gradient_of_inputs": Declared("cpu_loops.gradient_of_inputs", _arguments(5, 4, 2)),
    },
)

CONVERSIONS = KernelTable(
    what="GRUBlockCell",
    package=__package__,
    kernels=Conversions,
    types={dtype: {"T": ELEMENTS[dtype]} for dtype in (BFLOAT16, FLOAT16)},
    declared={
        "to_float32": Declared("cpu_loops.convert", "const {T}[], int64, float32[]"),
        "from_float32": Declared("cpu_loops.convert", "const float32[], int64, {T}[]"),
    },
)


_CHUNK_ELEMENTS = 1 << 14
"""The work of a chunk, about ten microseconds. For less, no thread is woken up."""

_CHUNK_ROWS = 128
"""The rows of a chunk of a vector's product with a matrix: few enough to share, and for a short sum."""

_CHUNK_CELLS = 256
"""The cells of a chunk of a vector's functions, a few microseconds."""


class CpuGRU:
    """GRUBlockCell by NumPy's BLAS for products of matrices, and fused kernels for the rest.

    [x, h] w is computed as x w_x + h w_h, with the rows of w for each, so nothing is copied. 16 bits are converted to
    float32 first, and rounded at the end. Until the kernels for a dtype are ready, and if they cannot be compiled,
    NumPy computes its calls.
    """

    def __init__(self, device: CpuDevice, parallel: ForkJoin, *, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        self._device = device
        self._chunk_elements = chunk_elements
        self._parallel = parallel
        self._products = Products(parallel)
        self._kernels = PreparedKernels(GRU_BLOCK_CELL, loader=parallel.loader)
        self._conversions = PreparedKernels(CONVERSIONS, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._kernels.prepare(stop)
        self._conversions.prepare(stop)

    def cell(self, inputs: CellInputs, sizes: Sizes) -> CellOutputs:
        """Computes GRUBlockCell."""
        dtype = inputs.x.dtype
        with np.errstate(all="ignore"):
            kernels = self._kernels_for(dtype)
            if kernels is None:
                return gru_block_cell(np, inputs, sizes)
            wide = CellInputs(*self._widened(inputs))
            outputs = (self._cell_of_one if sizes.batch == 1 else self._cell)(kernels, wide, sizes)
            return CellOutputs(*(self._rounded(output, dtype) for output in outputs))

    def gradient(self, inputs: GradInputs, attributes: GradAttributes, sizes: Sizes) -> GradOutputs:
        """Computes GRUBlockCellGrad."""
        dtype = inputs.x.dtype
        with np.errstate(all="ignore"):
            kernels = self._kernels_for(dtype)
            if kernels is None:
                return gru_block_cell_grad(np, inputs, attributes, sizes)
            wide = GradInputs(*self._widened(inputs))
            outputs = self._gradient(kernels, wide, sizes)
            if attributes.weight_gradients:
                _, _, d_c_bar, d_r_bar_u_bar = outputs
                outputs += self._weight_gradients(wide, d_c_bar, d_r_bar_u_bar, sizes)
            return GradOutputs(*(self._rounded(output, dtype) for output in outputs))

    def _cell(self, kernels: Kernels, inputs: CellInputs, sizes: Sizes) -> list[NDArray[Any]]:
        x, h_prev, dimensions = inputs.x, inputs.h_prev, (sizes.batch, sizes.cells)
        w_ru_x, w_ru_h = np.split(inputs.w_ru, [sizes.inputs])
        w_c_x, w_c_h = np.split(inputs.w_c, [sizes.inputs])
        r, u, c, h, h_prevr = (self._empty(h_prev.shape, x) for _ in range(5))
        ru_of_x, ru_of_h, c_of_x = self._multiply((x, w_ru_x), (h_prev, w_ru_h), (x, w_c_x))
        self._run(kernels, kernels.gates, (ru_of_x, ru_of_h, inputs.b_ru, h_prev), dimensions, (r, u, h_prevr))
        (c_of_h,) = self._multiply((h_prevr, w_c_h))
        self._run(kernels, kernels.state, (c_of_x, c_of_h, inputs.b_c, h_prev, u), dimensions, (c, h))
        return [r, u, c, h]

    def _cell_of_one(self, kernels: Kernels, inputs: CellInputs, sizes: Sizes) -> list[NDArray[Any]]:
        """Computes the same for a batch of one, by one kernel instead of BLAS."""
        cells, dtype = sizes.cells, inputs.x.dtype
        num_of_rows = -(-sizes.inputs // _CHUNK_ROWS) + -(-cells // _CHUNK_ROWS)
        r, u, c, h = (self._empty(inputs.h_prev.shape, inputs.x) for _ in range(4))
        given = (inputs.x, inputs.h_prev, inputs.w_ru, inputs.w_c, inputs.b_ru, inputs.b_c)
        scratch = (
            np.empty((num_of_rows, 2 * cells), dtype),
            np.empty((num_of_rows, cells), dtype),
            np.empty(cells, dtype),
        )
        arguments = (*(array.reshape(-1) for array in given), _CHUNK_ROWS, _CHUNK_CELLS, *scratch)
        results = tuple(array.reshape(-1) for array in (r, u, c, h))
        kernels.run(self._parallel, kernels.cell_of_one, (*arguments, *results), num_of_rows)
        return [r, u, c, h]

    def _gradient(self, kernels: Kernels, inputs: GradInputs, sizes: Sizes) -> list[NDArray[Any]]:
        """Returns the first four outputs."""
        h_prev, r, u, d_h = inputs.h_prev, inputs.r, inputs.u, inputs.d_h
        state, all_sizes = (sizes.batch, sizes.cells), (sizes.batch, sizes.inputs, sizes.cells)
        d_x, d_h_prev, d_c_bar = (self._empty(array.shape, array) for array in (inputs.x, h_prev, inputs.c))
        d_r_bar_u_bar = self._empty((sizes.batch, 2 * sizes.cells), d_h)
        self._run(kernels, kernels.gradient_of_state, (h_prev, u, inputs.c, d_h), state, (d_c_bar, d_r_bar_u_bar))
        (d_x_h_prevr,) = self._multiply((d_c_bar, inputs.w_c.T))
        self._run(kernels, kernels.gradient_of_reset, (d_x_h_prevr, h_prev, r), all_sizes, (d_r_bar_u_bar,))
        (d_x_h_prev,) = self._multiply((d_r_bar_u_bar, inputs.w_ru.T))
        self._run(kernels, kernels.gradient_of_inputs, (d_x_h_prev, d_x_h_prevr, r, u, d_h), all_sizes, (d_x, d_h_prev))
        return [d_x, d_h_prev, d_c_bar, d_r_bar_u_bar]

    def _weight_gradients(
        self, inputs: GradInputs, d_c_bar: NDArray[Any], d_r_bar_u_bar: NDArray[Any], sizes: Sizes
    ) -> list[NDArray[Any]]:
        """Returns the last four outputs."""
        d_w_ru, d_w_c, d_b_ru, d_b_c = (
            self._empty(array.shape, array) for array in (inputs.w_ru, inputs.w_c, inputs.b_ru, inputs.b_c)
        )
        h_prevr = np.multiply(inputs.h_prev, inputs.r, out=self._empty(inputs.r.shape, inputs.r))
        first, last = slice(sizes.inputs), slice(sizes.inputs, None)
        self._products.compute(
            *(
                Product(left, right, out, Summation.BLOCKS)
                for left, right, out in (
                    (inputs.x.T, d_r_bar_u_bar, d_w_ru[first]),
                    (inputs.h_prev.T, d_r_bar_u_bar, d_w_ru[last]),
                    (inputs.x.T, d_c_bar, d_w_c[first]),
                    (h_prevr.T, d_c_bar, d_w_c[last]),
                )
            )
        )
        d_b_ru[...] = sum_of_rows(d_r_bar_u_bar)
        d_b_c[...] = sum_of_rows(d_c_bar)
        return [d_w_ru, d_w_c, d_b_ru, d_b_c]

    def _multiply(self, *factors: tuple[NDArray[Any], NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the products of pairs of matrices."""
        products = [Product(left, right, self._empty((left.shape[0], right.shape[1]), left)) for left, right in factors]
        self._products.compute(*products)
        return [product.out for product in products]

    def _empty(self, shape: tuple[int, ...], like: NDArray[Any]) -> NDArray[Any]:
        return self._device.empty(shape, like.dtype)

    def _run(
        self,
        kernels: Kernels,
        kernel: Kernel,
        inputs: tuple[NDArray[Any], ...],
        dimensions: tuple[int, ...],
        outputs: tuple[NDArray[Any], ...],
    ) -> None:
        """Runs a kernel in chunks of rows. The first dimension is the number of rows, the last one their length."""
        chunk_rows = max(self._chunk_elements // max(dimensions[-1], 1), 1)
        flat_inputs, flat_outputs = ([array.reshape(-1) for array in group] for group in (inputs, outputs))
        arguments = (*flat_inputs, *dimensions, chunk_rows, *flat_outputs)
        kernels.run(self._parallel, kernel, arguments, -(-dimensions[0] // chunk_rows))

    def _kernels_for(self, dtype: np.dtype[Any]) -> Kernels | None:
        """Returns the kernels for a dtype, if all needed ones are ready."""
        is_ready = dtype.itemsize > 2 or self._conversions.get(dtype) is not None
        kernels = self._kernels.get(widened(dtype))  # in any case, as that asks for them
        return kernels if is_ready else None

    def _widened(self, inputs: CellInputs) -> list[NDArray[Any]]:
        """Returns all inputs, aligned, in the dtype of arithmetic."""
        arrays = [aligned(getattr(inputs, field.name)) for field in fields(inputs)]
        conversions = self._conversions.get(inputs.x.dtype)
        if conversions is None:
            return arrays
        wide = [self._device.empty(array.shape, FLOAT32) for array in arrays]
        for array, target in zip(arrays, wide, strict=True):
            self._convert(conversions, conversions.to_float32, array, target)
        return wide

    def _rounded(self, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        conversions = self._conversions.get(dtype)
        if conversions is None:
            return array
        rounded = self._device.empty(array.shape, dtype)
        self._convert(conversions, conversions.from_float32, array, rounded)
        return rounded

    def _convert(self, conversions: Conversions, kernel: Kernel, source: NDArray[Any], target: NDArray[Any]) -> None:
        arguments = (flat(source), self._chunk_elements, flat(target))
        conversions.run(self._parallel, kernel, arguments, -(-source.size // self._chunk_elements))
