"""GRUBlockCell and GRUBlockCellGrad on a GPU: the CUDA programs and their launches. Importing this needs no GPU."""

import functools
from collections.abc import Callable
from dataclasses import fields
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
from gradserve_server.devices.device import Array
from gradserve_server.ops.gru.spec import (
    CellInputs,
    CellOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    Sizes,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

ARITHMETIC: tuple[np.dtype[Any], ...] = (FLOAT32, FLOAT64)
CONVERTED: tuple[np.dtype[Any], ...] = (BFLOAT16, FLOAT16)
"""ARITHMETIC has the dtypes that kernels compute with, CONVERTED those that are converted to float32 and back."""

ARGUMENTS = {
    "gates": Struct(("ru_of_x", "ru_of_h", "b_ru", "h_prev", "r", "u", "h_prevr"), ("rows", "cells")),
    "state": Struct(("c_of_x", "c_of_h", "b_c", "h_prev", "u", "c", "h"), ("rows", "cells")),
    "gradient_of_state": Struct(
        ("h_prev", "r", "u", "c", "d_h", "d_c_bar", "d_r_bar_u_bar", "h_prevr"),
        ("rows", "cells"),
    ),
    "gradient_of_reset": Struct(("d_x_h_prevr", "h_prev", "r", "d_r_bar_u_bar"), ("rows", "inputs", "cells")),
    "gradient_of_inputs": Struct(
        ("d_x_h_prev", "d_x_h_prevr", "r", "u", "d_h", "d_x", "d_h_prev"),
        ("rows", "inputs", "cells"),
    ),
    "to_float32": Struct(("source", "target"), ("count",)),
    "from_float32": Struct(("source", "target"), ("count",)),
}
"""The arguments, by kernel."""
CONVERSIONS = ("to_float32", "from_float32")


def kernel_name(kernel: str, dtype: np.dtype[Any]) -> str:
    """The name of an instance of a template."""
    return f"gru_{kernel}_{dtype.name}"


@functools.cache
def program(dtype: np.dtype[Any]) -> Program:
    """The kernels that compute with a dtype; for a dtype of 16 bits, the kernels that convert it."""
    kernels = [kernel for kernel in ARGUMENTS if (kernel in CONVERSIONS) == (dtype in CONVERTED)]
    instances = {kernel_name(kernel, dtype): _instance(kernel, dtype) for kernel in kernels}
    parts = [*element_sources(), (resources.files(__package__) / "gru.cu").read_text(encoding="utf-8")]
    return Program(f"GRU {dtype.name}", "\n".join([*parts, *instances.values()]), tuple(instances))


def kernel_launch(kernel: str, dtype: np.dtype[Any], count: int, limits: Limits) -> Launch:
    """The launch of a kernel for `count` elements, at least one."""
    return element_launch(kernel_name(kernel, dtype), count, limits)


def _instance(kernel: str, dtype: np.dtype[Any]) -> str:
    types, template = ELEMENTS[dtype], kernel
    if kernel in CONVERSIONS:
        template = "convert"
        types = f"{types}, float" if kernel == "to_float32" else f"float, {types}"
    struct = f"{template.title().replace('_', '')}Arguments<{types}>"
    return instance(kernel_name(kernel, dtype), str(ELEMENT_THREADS), struct, f"{template}<{types}>")


class CudaGRU:
    """GRUBlockCell by cuBLAS for products of matrices, and fused kernels for the rest.

    Safe to use from several threads.

    [x, h] w is computed as x w_x + h w_h, with the rows of w for each, so nothing is copied. 16 bits are converted to
    float32 first, and rounded at the end. Products of float32 are in float32, not in TF32.
    """

    def __init__(self, device: KernelDevice, xp: Any) -> None:
        self._device = device
        self._xp = xp
        self._programs = Programs(device, program, (*ARITHMETIC, *CONVERTED))

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def cell(self, inputs: CellInputs, sizes: Sizes) -> CellOutputs:
        """Computes GRUBlockCell, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        outputs = self._cell(CellInputs(*self._widened(inputs)), sizes)
        return CellOutputs(*(self._rounded(output, inputs.x.dtype) for output in outputs))

    def gradient(self, inputs: GradInputs, attributes: GradAttributes, sizes: Sizes) -> GradOutputs:
        """Computes GRUBlockCellGrad, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        outputs = self._gradient(GradInputs(*self._widened(inputs)), sizes, attributes.weight_gradients)
        return GradOutputs(*(self._rounded(output, inputs.x.dtype) for output in outputs))

    def _cell(self, inputs: CellInputs, sizes: Sizes) -> list[Array]:
        x, h_prev, first, dtype = inputs.x, inputs.h_prev, sizes.inputs, inputs.x.dtype
        r, u, c, h, h_prevr = (self._empty_like(h_prev) for _ in range(5))
        numbers = {"rows": sizes.batch, "cells": sizes.cells}
        arrays = {
            "ru_of_x": self._product(x, inputs.w_ru[:first]),
            "ru_of_h": self._product(h_prev, inputs.w_ru[first:]),
        }
        arrays |= {"b_ru": inputs.b_ru, "h_prev": h_prev, "r": r, "u": u, "h_prevr": h_prevr}
        self._launch("gates", dtype, h_prev.size, arrays, numbers)
        arrays = {
            "c_of_x": self._product(x, inputs.w_c[:first]),
            "c_of_h": self._product(h_prevr, inputs.w_c[first:]),
        }
        arrays |= {"b_c": inputs.b_c, "h_prev": h_prev, "u": u, "c": c, "h": h}
        self._launch("state", dtype, h_prev.size, arrays, numbers)
        return [r, u, c, h]

    def _gradient(self, inputs: GradInputs, sizes: Sizes, weight_gradients: bool) -> list[Array]:
        given = {name: getattr(inputs, name) for name in ("h_prev", "r", "u", "c", "d_h")}
        made = {"d_x": self._empty_like(inputs.x)}
        made |= {name: self._empty_like(inputs.h_prev) for name in ("d_h_prev", "d_c_bar", "h_prevr")}
        made["d_r_bar_u_bar"] = self._device.empty((sizes.batch, 2 * sizes.cells), inputs.x.dtype)
        arrays, numbers = given | made, vars(sizes) | {"rows": sizes.batch}
        num_states, dtype = inputs.h_prev.size, inputs.x.dtype
        self._launch("gradient_of_state", dtype, num_states, arrays, numbers)
        arrays["d_x_h_prevr"] = self._product(made["d_c_bar"], inputs.w_c.T)
        self._launch("gradient_of_reset", dtype, num_states, arrays, numbers)
        arrays["d_x_h_prev"] = self._product(made["d_r_bar_u_bar"], inputs.w_ru.T)
        self._launch("gradient_of_inputs", dtype, num_states + inputs.x.size, arrays, numbers)
        outputs = [made[name] for name in ("d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar")]
        return outputs + self._weight_gradients(inputs, made, sizes) if weight_gradients else outputs

    def _weight_gradients(self, inputs: GradInputs, made: dict[str, Array], sizes: Sizes) -> list[Array]:
        d_w_ru, d_w_c, d_b_ru, d_b_c = (
            self._empty_like(array) for array in (inputs.w_ru, inputs.w_c, inputs.b_ru, inputs.b_c)
        )
        ones = self._xp.ones((1, sizes.batch), inputs.x.dtype)
        for state, d_bar, d_w, d_b in (
            (inputs.h_prev, made["d_r_bar_u_bar"], d_w_ru, d_b_ru),
            (made["h_prevr"], made["d_c_bar"], d_w_c, d_b_c),
        ):
            self._xp.matmul(inputs.x.T, d_bar, out=d_w[: sizes.inputs])
            self._xp.matmul(state.T, d_bar, out=d_w[sizes.inputs :])
            self._xp.matmul(ones, d_bar, out=d_b.reshape(1, -1))
        return [d_w_ru, d_w_c, d_b_ru, d_b_c]

    def _product(self, left: Array, right: Array) -> Array:
        out = self._device.empty((left.shape[0], right.shape[1]), left.dtype)
        return self._xp.matmul(left, right, out=out)

    def _empty_like(self, array: Array) -> Array:
        return self._device.empty(array.shape, array.dtype)

    def _launch(
        self, kernel: str, dtype: np.dtype[Any], count: int, arrays: dict[str, Array], numbers: dict[str, int]
    ) -> None:
        """Starts a kernel for this many elements; it uses what it needs of `arrays` and `numbers`."""
        if count == 0:
            return
        struct = ARGUMENTS[kernel]
        arguments = struct.of({name: self._device.address(arrays[name]) for name in struct.arrays}, numbers)
        launch = kernel_launch(kernel, dtype, count, self._device.limits)
        self._programs[dtype].launch(launch, arguments)

    def _widened(self, inputs: CellInputs) -> list[Array]:
        arrays = [getattr(inputs, field.name) for field in fields(inputs)]
        dtype = inputs.x.dtype
        if dtype not in CONVERTED:
            return arrays
        return [self._converted("to_float32", dtype, array, FLOAT32) for array in arrays]

    def _rounded(self, array: Array, dtype: np.dtype[Any]) -> Array:
        return array if array.dtype == dtype else self._converted("from_float32", dtype, array, dtype)

    def _converted(self, kernel: str, dtype: np.dtype[Any], source: Array, to: np.dtype[Any]) -> Array:
        target = self._device.empty(source.shape, to)
        self._launch(kernel, dtype, source.size, {"source": source, "target": target}, {"count": source.size})
        return target
