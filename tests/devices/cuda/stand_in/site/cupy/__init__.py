"""Stands for CuPy: the same names and rules, on a GPU that is simulated."""

from typing import Any

import cupy_backends.cuda.api.driver
import cupy_backends.cuda.api.runtime
import cupy_backends.cuda.libs.cublas  # noqa: F401  CuPy loads all of them
import numpy as np

from . import _core, _driver, cuda
from ._core._launches import launch as _launch
from ._core._routines import compute as _compute
from ._core._routines import concatenate, matmul, where
from ._core.core import ndarray
from ._core.raw import RawModule
from .cuda.memory import _default_pool
from .cuda.pinned_memory import _default_pool as _default_pinned_pool

__version__ = "14.2.0"

_driver.install()

float16, float32, float64 = np.float16, np.float32, np.float64
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
bool_, nan, inf, newaxis = np.bool_, np.nan, np.inf, None

_UFUNCS = (
    *("absolute", "add", "divide", "exp", "isfinite", "isnan", "log", "log1p", "logical_not", "maximum", "minimum"),
    *("multiply", "negative", "power", "sign", "sqrt", "square", "subtract", "tanh"),
)


def __getattr__(name: str) -> Any:
    if name == "abs":
        name = "absolute"
    if name not in _UFUNCS:
        raise AttributeError(f"module 'cupy' has no attribute {name!r}, as far as this stand-in knows")
    ufunc = "true_divide" if name == "divide" else name
    return lambda *operands, out=None: _compute(ufunc, *operands, out=out)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    made = ndarray(shape, dtype, order=order)
    made.data.memset_async(0, made.nbytes)
    return made


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = ndarray(shape, np.array(fill_value).dtype if dtype is None else dtype, order=order)
    made.fill(fill_value)
    return made


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(prototype.shape, prototype.dtype if dtype is None else dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, a.dtype if dtype is None else dtype)


def array(obj: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
    if (interface := getattr(obj, "__cuda_array_interface__", None)) is not None:
        return _adopted(obj, interface)
    given = np.ascontiguousarray(obj, dtype)
    made = ndarray(np.shape(obj), given.dtype)
    made.set(given.reshape(made.shape))
    return made


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, copy=False)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    dtype = a.dtype if dtype is None else np.dtype(dtype)
    return a if a.flags.c_contiguous and a.dtype == dtype else a.astype(dtype)


def copyto(dst: ndarray, src: Any) -> None:
    _launch("copyto", lambda out, given: np.copyto(out, given), [dst, src], writes=1)


def asnumpy(a: ndarray, stream: Any = None) -> Any:
    return a.get(stream)


def get_default_memory_pool() -> cuda.MemoryPool:
    return _default_pool


def get_default_pinned_memory_pool() -> cuda.PinnedMemoryPool:
    return _default_pinned_pool


def _adopted(owner: Any, interface: dict[str, Any]) -> ndarray:
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    memory = cuda.UnownedMemory(interface["data"][0], int(np.prod(shape)) * dtype.itemsize, owner)
    if interface.get("stream") is not None:
        cuda.runtime.streamSynchronize(interface["stream"])
    return ndarray(shape, dtype, cuda.MemoryPointer(memory, 0), interface.get("strides"))


__all__ = ["RawModule", "_core", "concatenate", "cuda", "matmul", "ndarray", "where"]
