"""Stands for CuPy's extensions."""

from typing import Any

import numpy as np
from cupy import cuda
from numpy.typing import NDArray


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> NDArray[Any]:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = cuda.alloc_pinned_memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.ndarray(shape, dtype, memory, order="C")


def zeros_pinned(shape: Any, dtype: Any = float, order: str = "C") -> NDArray[Any]:
    made = empty_pinned(shape, dtype, order)
    made[...] = 0
    return made


def empty_like_pinned(a: Any, dtype: Any = None) -> NDArray[Any]:
    return empty_pinned(a.shape, a.dtype if dtype is None else dtype)
