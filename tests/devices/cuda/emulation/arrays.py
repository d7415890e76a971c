"""Arrays and functions that are as strict as CuPy's: nothing but a device's own arrays, and nothing that it lacks."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.tensors.spec import BFLOAT16

_WITH_BFLOAT16 = (np.add, np.subtract, np.multiply, np.true_divide, np.negative, np.power)
"""Those that CuPy 14 has for bfloat16, and that are needed."""


class Memory(Protocol):
    """Where arrays are."""

    @property
    def is_computing(self) -> bool: ...

    def copied(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a copy in this memory."""
        ...


Operator: TypeAlias = "Callable[[DeviceArray, Any], DeviceArray]"


def _operators(ufunc: np.ufunc) -> tuple[Operator, Operator]:
    """Returns the methods of an operator: with the array on its left, and on its right."""
    return lambda self, other: _compute(ufunc, self, other), lambda self, other: _compute(ufunc, other, self)


class DeviceArray:
    """An array of a device, with what layers need of CuPy's.

    As there, results without dimensions stay arrays, and NumPy's arrays are no operands. As it should be, nothing is
    computed outside the device's `computing`, and nothing is read by the host.
    """

    def __init__(self, hidden: NDArray[Any], memory: Memory) -> None:
        self.hidden = hidden
        self.memory = memory

    dtype = property(lambda self: self.hidden.dtype)
    shape = property(lambda self: self.hidden.shape)
    size = property(lambda self: self.hidden.size)
    nbytes = property(lambda self: self.hidden.nbytes)

    def astype(self, dtype: Any, copy: bool = True) -> "DeviceArray":
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return _compute(lambda array: array.astype(dtype), self)

    def sum(self, axis: Any = None, dtype: Any = None) -> "DeviceArray":
        return _compute(lambda array: array.sum(axis, dtype), self)

    def repeat(self, count: int) -> "DeviceArray":
        return _compute(lambda array: array.repeat(count), self)

    def reshape(self, *shape: Any) -> "DeviceArray":
        return DeviceArray(self.hidden.reshape(*shape), self.memory)

    def __getitem__(self, index: tuple[slice | None, ...]) -> "DeviceArray":
        assert all(part is None or part == slice(None) for part in index)
        return DeviceArray(self.hidden[index], self.memory)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> "DeviceArray":
        """With one of NumPy's numbers on the left."""
        assert method == "__call__"
        assert not kwargs
        return _compute(ufunc, *inputs)

    def __neg__(self) -> "DeviceArray":
        return _compute(np.negative, self)

    __add__, __radd__ = _operators(np.add)
    __sub__, __rsub__ = _operators(np.subtract)
    __mul__, __rmul__ = _operators(np.multiply)
    __truediv__, __rtruediv__ = _operators(np.true_divide)
    __pow__, __rpow__ = _operators(np.power)

    def __eq__(self, other: object) -> "DeviceArray":  # type: ignore[override]
        return _compute(np.equal, self, other)

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> "DeviceArray":
        return self._in_place(np.add, other)

    def __imul__(self, other: Any) -> "DeviceArray":
        return self._in_place(np.multiply, other)

    def __bool__(self) -> bool:
        raise TypeError("the host reads a number of the device, and waits for it")

    __float__ = __int__ = __bool__

    def __array__(self, *_: object) -> NDArray[Any]:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def _in_place(self, ufunc: np.ufunc, other: Any) -> "DeviceArray":
        self.hidden[...] = _compute(ufunc, self, other).hidden
        return self


class DeviceNamespace:
    """What stands for CuPy: functions over `DeviceArray`s."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def full(self, shape: int | tuple[int, ...], value: float, dtype: np.dtype[Any]) -> DeviceArray:
        return DeviceArray(self._memory.copied(np.full(shape, value, dtype)), self._memory)

    def asarray(self, array: DeviceArray, dtype: Any = None) -> DeviceArray:
        assert isinstance(array, DeviceArray), "something travels to the device"
        return array if dtype is None else array.astype(dtype, copy=False)

    def where(self, condition: DeviceArray, yes: Any, no: Any) -> DeviceArray:
        assert isinstance(condition, DeviceArray)
        return _compute(np.where, condition, yes, no)

    def __getattr__(self, name: str) -> Callable[..., DeviceArray]:
        if name not in ("abs", "maximum", "minimum", "power", "sign", "sqrt", "square"):
            raise AttributeError(f"{name} is not known to be CuPy's")
        return lambda *operands: _compute(getattr(np, name), *operands)


def _compute(function: Callable[..., Any], *operands: Any) -> DeviceArray:
    memories = [operand.memory for operand in operands if isinstance(operand, DeviceArray)]
    memory = memories[0]
    assert memory.is_computing, "outside the device's `computing`"
    assert all(other is memory for other in memories)
    for operand in operands:
        if not isinstance(operand, DeviceArray | np.generic | int | float):
            raise TypeError(f"Unsupported type {type(operand)}")
        if getattr(operand, "dtype", None) == BFLOAT16 and isinstance(function, np.ufunc):
            assert function in _WITH_BFLOAT16, f"{function} of bfloat16"
    with np.errstate(all="ignore"):
        result = function(*(each.hidden if isinstance(each, DeviceArray) else each for each in operands))
    return DeviceArray(memory.copied(np.asarray(result)), memory)
