"""What CuPy computes with its arrays, as far as it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import cuda
from ._launches import launch
from ._routines_linalg import COMPUTE_TYPE_PEDANTIC, get_compute_type

if TYPE_CHECKING:
    from .core import ndarray

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WITH_BFLOAT16 = frozenset({"add", "subtract", "multiply", "true_divide", "negative", "power", "equal", "not_equal"})
"""The functions that CuPy 14 is known to have for bfloat16, and that are needed."""


def compute(name: str, *operands: Any, out: ndarray | None = None) -> ndarray:
    """Computes a universal function of NumPy's."""
    ufunc: Any = getattr(np, name)
    _check_operands(name, operands)
    if out is None:
        result = _sample(ufunc, operands)
        out = _new(np.broadcast_shapes(*map(_shape, operands)), result.dtype)
        launch(name, lambda out, *given: ufunc(*given, out=out), [out, *operands], writes=1)
    else:
        dtype = out.dtype
        launch(
            name,
            lambda out, *given: np.copyto(out, ufunc(*given).astype(dtype), "same_kind"),
            [out, *operands],
            writes=1,
        )
    return out


def where(condition: Any, yes: Any, no: Any) -> ndarray:
    """Returns elements of one array or of another."""
    operands = (condition, yes, no)
    _check_operands("where", [])
    dtype = _sample(np.where, operands).dtype
    out = _new(np.broadcast_shapes(*map(_shape, operands)), dtype)
    launch("where", lambda out, *given: np.copyto(out, np.where(*given)), [out, *operands], writes=1)
    return out


def reduce_to(name: str, array: ndarray, axis: Any, dtype: Any, keepdims: bool) -> ndarray:
    """Computes a reduction by a method of NumPy's arrays."""
    _check_operands(name, [array] if name != "sum" else [])
    axes = range(array.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    dropped = {each % array.ndim for each in axes}
    kept = [
        (1 if place in dropped else size) for place, size in enumerate(array.shape) if keepdims or place not in dropped
    ]
    arguments: dict[str, Any] = {"axis": axis if axis is None or isinstance(axis, int) else tuple(axis)}
    if dtype is not None:
        arguments["dtype"] = dtype
    result = getattr(np.ones((1,) * array.ndim, array.dtype), name)(**arguments)
    out = _new(tuple(kept), result.dtype)

    def run(out: NDArray[Any], given: NDArray[Any]) -> None:
        np.copyto(out, getattr(given, name)(keepdims=keepdims, **arguments))

    launch(name, run, [out, array], writes=1)
    return out


def matmul(x1: Any, x2: Any, out: ndarray | None = None) -> ndarray:
    """Multiplies matrices, as cuBLAS does."""
    if x1.dtype != x2.dtype or x1.ndim != 2 or x2.ndim != 2:
        raise NotImplementedError("matrices of one dtype are all that this stand-in multiplies")
    if x1.dtype == np.float32 and get_compute_type(x1.dtype) != COMPUTE_TYPE_PEDANTIC:
        raise NotImplementedError("cuBLAS may round the factors of this product")
    if x1.shape[1] != x2.shape[0]:
        raise ValueError(f"matmul: shapes {x1.shape} and {x2.shape} do not fit")
    shape = (x1.shape[0], x2.shape[1])
    if out is None:
        out = _new(shape, x1.dtype)
    elif (out.shape, out.dtype) != (shape, x1.dtype):
        raise ValueError(f"Output array has shape {out.shape} and dtype {out.dtype}, expected {shape}, {x1.dtype}")
    cuda.get_cublas_handle()
    launch("matmul", lambda out, x1, x2: np.copyto(out, np.matmul(x1, x2)), [out, x1, x2], writes=1)
    return out


def concatenate(arrays: Sequence[Any], axis: int = 0) -> ndarray:
    """Joins arrays."""
    shape = list(arrays[0].shape)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    out = _new(tuple(shape), np.result_type(*(array.dtype for array in arrays)))
    launch("concatenate", lambda out, *given: np.concatenate(given, axis, out=out), [out, *arrays], writes=1)
    return out


def _new(shape: tuple[int, ...], dtype: Any) -> ndarray:
    from .core import ndarray

    return ndarray(shape, dtype)


def _shape(operand: Any) -> tuple[int, ...]:
    return getattr(operand, "shape", ())


def _sample(function: Any, operands: Sequence[Any]) -> Any:
    """Returns the result for one element of each operand, whose dtype is the whole result's."""
    with np.errstate(all="ignore"):
        return function(*(np.ones(1, each.dtype) if hasattr(each, "_layout") else each for each in operands))


def _check_operands(name: str, operands: Sequence[Any]) -> None:
    for each in operands:
        if isinstance(each, np.ndarray):
            raise TypeError(f"Unsupported type {type(each)}")
        if getattr(each, "dtype", None) == _BFLOAT16 and name not in _WITH_BFLOAT16:
            raise TypeError(f"{name} of bfloat16 is not known to be CuPy's")
