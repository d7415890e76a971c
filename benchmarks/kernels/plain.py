"""Plain Numba in place of the tool chain: indexing, scalar loops, NumPy's functions and Numba's threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload, register_jitable

INLINED: Any = {"fastmath": {"contract"}, "forceinline": True}


def load(array: Any, index: Any) -> Any:
    """Returns array[index], widened; 16-bit floats by arithmetic on their bits."""


def store(array: Any, index: Any, value: Any) -> None:
    """Sets array[index], rounded; 16-bit floats by arithmetic on their bits."""


@overload(load, jit_options=INLINED)
def _load(array: Any, index: Any) -> Any:
    return {types.uint16: _load_bfloat16, types.int16: _load_float16}.get(array.dtype, _load_number)


@overload(store, jit_options=INLINED)
def _store(array: Any, index: Any, value: Any) -> Any:
    return {types.uint16: _store_bfloat16, types.int16: _store_float16}.get(array.dtype, _store_number)


@register_jitable(**INLINED)
def store_at(place: Any, array: Any, index: Any, value: Any) -> None:
    """Does what `store` does."""
    store(array, index, value)


def _load_number(array: Any, index: Any) -> Any:
    return array[index]


def _store_number(array: Any, index: Any, value: Any) -> None:
    array[index] = value


def _load_bfloat16(array: Any, index: Any) -> Any:
    return np.uint32(np.uint32(array[index]) << np.uint32(16)).view(np.float32)


def _store_bfloat16(array: Any, index: Any, value: Any) -> None:
    number = np.float32(value)
    bits = number.view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    bits = rounded if number == number else np.uint32(bits | np.uint32(0x400000))
    array[index] = np.uint16(bits >> np.uint32(16))


def _load_float16(array: Any, index: Any) -> Any:
    bits = np.uint32(np.uint16(array[index]))
    magnitude = np.uint32(bits & np.uint32(0x7FFF))
    shifted = np.uint32(magnitude << np.uint32(13))
    special = np.uint32(shifted | np.uint32(0x7F800000))
    normal = special if magnitude >= np.uint32(0x7C00) else np.uint32(shifted + np.uint32(0x38000000))
    subnormal = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    value = subnormal if magnitude < np.uint32(0x400) else normal
    return np.uint32(value | np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


def _store_float16(array: Any, index: Any, value: Any) -> None:
    number = np.float32(value)
    bits = number.view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    rounded = np.uint32(magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1)))
    normal = np.uint32((rounded - np.uint32(0x38000000)) >> np.uint32(13))
    normal = np.uint32(0x7C00) if normal > np.uint32(0x7C00) else normal
    half = np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
    result = np.uint32(half - np.uint32(0x3F000000)) if magnitude < np.uint32(0x38800000) else normal
    result = result if number == number else np.uint32(0x7E00)
    array[index] = np.int16(np.uint16(result | sign))


@register_jitable(**INLINED)
def differences_of_block(x: Any, first: Any, size: Any, center: Any, before: Any, after: Any) -> Any:
    """The sums of `moments`, added up one after another, in float64 for the precision of the vectors."""
    total, squares = 0.0, 0.0
    for index in range(first, first + size):
        difference = (load(x, index) * before - center * before) * after
        total += difference
        squares += difference * difference
    return total, squares


@register_jitable(**INLINED)
def products_of_block(dy: Any, x: Any, mean: Any, reduction: Any, b: Any, c: Any, first: Any, size: Any) -> Any:
    """The sums of a plane of FusedBatchNormGrad, without a relu."""
    total, dot = 0.0, 0.0
    for index in range(first, first + size):
        g = load(dy, index)
        total += g
        dot += g * ((load(x, index) - mean) * reduction)
    return total, dot


@register_jitable(**INLINED)
def sums_of_block(dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, first: Any, start: Any, size: Any) -> Any:
    """The sums of a group of LayerNormGrad."""
    total, dot = 0.0, 0.0
    for index in range(size):
        g = load(dy, first + index) * load(scale, start + index)
        total += g
        dot += g * ((load(x, first + index) - mean) * rstd)
    return total, dot


@register_jitable(**INLINED)
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) with NumPy's function."""
    return 1 / (1 + np.exp(-x))


@register_jitable(**INLINED)
def hyperbolic_tangent(x: Any) -> Any:
    """NumPy's function."""
    return np.tanh(x)


class NumbaThreads:
    """Runs shared kernels as `ForkJoin` does, on the threads of `njit(parallel=True)`."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._loops: dict[Any, Callable[..., None]] = {}

    def run_shared(self, attend: Any, kernel: Any, arguments: tuple[Any, ...], num_parts: int) -> None:
        """Runs a kernel in every thread of a parallel loop."""
        if kernel not in self._loops:
            self._loops[kernel] = _parallel_loop(kernel)
        self._loops[kernel](min(self.num_threads, num_parts), np.zeros((1, 16), np.int64), *arguments)


def _parallel_loop(kernel: Any) -> Callable[..., None]:
    names = ", ".join(list(inspect.signature(kernel.py_func).parameters)[2:])
    source = f"def loop(n, board, {names}):\n    for _ in prange(n):\n        kernel(board, 0, {names})\n"
    namespace: dict[str, Any] = {"prange": prange, "kernel": kernel}
    exec(source, namespace)  # noqa: S102 (our own text)
    compiled: Callable[..., None] = njit(parallel=True, nogil=True, error_model="numpy")(namespace["loop"])
    return compiled
