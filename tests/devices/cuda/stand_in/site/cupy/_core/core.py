"""Arrays of a GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import cuda
from .._machine import MACHINE
from ._launches import Layout, launch
from ._routines import compute, matmul, reduce_to


class ndarray:  # noqa: N801
    """An array in the memory of a GPU.

    The host sees nothing of it but by `get`. NumPy's arrays are no operands.
    """

    __array_priority__ = 100

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: Any = float,
        memptr: cuda.MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
        order: str = "C",
    ) -> None:
        if order != "C":
            raise ValueError(f"order not understood. order={order}")
        self.shape: tuple[int, ...] = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.strides = _contiguous(self.shape, self.dtype.itemsize) if strides is None else tuple(strides)
        self.data = cuda.alloc(self.nbytes) if memptr is None else memptr
        self.base: ndarray | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> cuda.Device:
        return self.data.device

    @property
    def flags(self) -> Any:
        return self._layout.at().flags

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr, False),
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": cuda.get_current_stream().ptr or 1,
        }

    # Copies to and from the host

    def get(self, stream: Any = None, order: str = "C", out: NDArray[Any] | None = None, blocking: bool = True) -> Any:
        stream = cuda.get_current_stream() if stream is None else stream
        with _on(stream):
            source = self if self.flags.c_contiguous else self.copy()
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif (out.dtype, out.shape) != (self.dtype, self.shape):
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif not out.flags.c_contiguous:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        source.data.copy_to_host_async(out.ctypes.data, self.nbytes, stream)
        if blocking:
            stream.synchronize()
        return out

    def set(self, arr: NDArray[Any], stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        arr = np.ascontiguousarray(arr)
        self.data.copy_from_host_async(arr.ctypes.data, self.nbytes, stream)

    # Views

    def _viewed(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> ndarray:
        whole = self._layout.at()
        part = function(whole)
        offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0] if part.size else 0
        view = ndarray(part.shape, part.dtype, self.data + offset if offset else self.data, part.strides)
        view.base = self if self.base is None else self.base
        return view

    @property
    def _layout(self) -> Layout:
        return Layout(self.data.ptr, self.shape, self.dtype, self.strides)

    def reshape(self, *shape: Any) -> ndarray:
        if not self.flags.c_contiguous:
            return self.copy().reshape(*shape)
        return self._viewed(lambda whole: whole.reshape(*shape))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._viewed(lambda whole: whole.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._viewed(lambda whole: whole.swapaxes(axis1, axis2))

    def view(self, dtype: Any = None) -> ndarray:
        return self._viewed(lambda whole: whole.view() if dtype is None else whole.view(np.dtype(dtype)))

    def __getitem__(self, index: Any) -> ndarray:
        _check_index(index)
        key = index if isinstance(index, tuple) else (index,)
        # As NumPy, but an array even without dimensions.
        return self._viewed(lambda whole: whole[key if Ellipsis in key else (*key, Ellipsis)])

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("non-scalar numpy.ndarray cannot be used for fill or assignment")
        launch("assignment", lambda out, given: np.copyto(out, given, "unsafe"), [target, value], writes=1)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    # Work

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            raise TypeError("a number of the host was expected")
        self[...] = value

    def copy(self) -> ndarray:
        copied = ndarray(self.shape, self.dtype)
        copied[...] = self
        return copied

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        dtype = np.dtype(dtype)
        if not copy and dtype == self.dtype:
            return self
        converted = ndarray(self.shape, dtype)
        launch("conversion", _convert, [converted, self], writes=1)
        return converted

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return reduce_to("sum", self, axis, dtype, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce_to("max", self, axis, None, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce_to("min", self, axis, None, keepdims)

    def all(self, axis: Any = None) -> ndarray:
        return reduce_to("all", self, axis, None, False)

    def any(self, axis: Any = None) -> ndarray:
        return reduce_to("any", self, axis, None, False)

    def repeat(self, repeats: int, axis: int | None = None) -> ndarray:
        shape = np.broadcast_to(np.empty((), self.dtype), self.shape).repeat(repeats, axis).shape
        repeated = ndarray(shape, self.dtype)
        launch("repeat", lambda out, x: np.copyto(out, x.repeat(repeats, axis)), [repeated, self], writes=1)
        return repeated

    def __neg__(self) -> ndarray:
        return compute("negative", self)

    def __abs__(self) -> ndarray:
        return compute("absolute", self)

    def __add__(self, other: Any) -> ndarray:
        return compute("add", self, other)

    def __radd__(self, other: Any) -> ndarray:
        return compute("add", other, self)

    def __sub__(self, other: Any) -> ndarray:
        return compute("subtract", self, other)

    def __rsub__(self, other: Any) -> ndarray:
        return compute("subtract", other, self)

    def __mul__(self, other: Any) -> ndarray:
        return compute("multiply", self, other)

    def __rmul__(self, other: Any) -> ndarray:
        return compute("multiply", other, self)

    def __truediv__(self, other: Any) -> ndarray:
        return compute("true_divide", self, other)

    def __rtruediv__(self, other: Any) -> ndarray:
        return compute("true_divide", other, self)

    def __pow__(self, other: Any) -> ndarray:
        return compute("power", self, other)

    def __rpow__(self, other: Any) -> ndarray:
        return compute("power", other, self)

    def __and__(self, other: Any) -> ndarray:
        return compute("bitwise_and", self, other)

    def __rand__(self, other: Any) -> ndarray:
        return compute("bitwise_and", other, self)

    def __or__(self, other: Any) -> ndarray:
        return compute("bitwise_or", self, other)

    def __ror__(self, other: Any) -> ndarray:
        return compute("bitwise_or", other, self)

    def __lt__(self, other: Any) -> ndarray:
        return compute("less", self, other)

    def __le__(self, other: Any) -> ndarray:
        return compute("less_equal", self, other)

    def __gt__(self, other: Any) -> ndarray:
        return compute("greater", self, other)

    def __ge__(self, other: Any) -> ndarray:
        return compute("greater_equal", self, other)

    def __iadd__(self, other: Any) -> ndarray:
        return compute("add", self, other, out=self)

    def __isub__(self, other: Any) -> ndarray:
        return compute("subtract", self, other, out=self)

    def __imul__(self, other: Any) -> ndarray:
        return compute("multiply", self, other, out=self)

    def __itruediv__(self, other: Any) -> ndarray:
        return compute("true_divide", self, other, out=self)

    def __matmul__(self, other: Any) -> ndarray:
        return matmul(self, other)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> ndarray:
        if method != "__call__" or kwargs:
            raise TypeError(f"{ufunc}.{method} is not for arrays of a GPU")
        return compute({"divide": "true_divide"}.get(ufunc.__name__, ufunc.__name__), *inputs)

    def __eq__(self, other: object) -> ndarray:  # type: ignore[override]
        return compute("equal", self, other)

    def __ne__(self, other: object) -> ndarray:  # type: ignore[override]
        return compute("not_equal", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def _read(self, *_: object) -> Any:
        raise MACHINE.fault("the host reads a number of the device, and waits for it")

    __bool__ = __float__ = __int__ = __index__ = item = tolist = _read


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))


def _check_index(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if part is not None and part is not Ellipsis and not isinstance(part, slice | int | np.integer):
            raise NotImplementedError(f"an index of type {type(part)}: this stand-in has views only")


def _convert(out: NDArray[Any], given: NDArray[Any]) -> None:
    np.copyto(out, given, "unsafe")


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream == cuda.get_current_stream() else stream
