"""Tensors and arrays that share memory."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from gradserve_protocol.arrays import BFLOAT16

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_WITHOUT_NUMPY = {torch.bfloat16: BFLOAT16} | {
    getattr(torch, name): np.dtype(getattr(ml_dtypes, name))
    for name in _FLOAT8
    if hasattr(torch, name) and hasattr(ml_dtypes, name)
}
"""The dtypes that PyTorch does not take from NumPy, nor gives to it: their tensors pass as integers."""
_WITH_NAMES = {array: tensor for tensor, array in _WITHOUT_NUMPY.items()}
_INTEGERS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}


class _Readable:
    """The memory of an array, described so that PyTorch makes a tensor of it even if it must only be read."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.__array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
            "version": 3,
        }
        self._array = array  # which keeps the memory alive


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Returns an array as a tensor in the same memory.

    The tensor must not be written to if the array is read-only: the memory may be mapped so that writing ends the
    process.

    Args:
        array: An array of a dtype that both libraries have, or of bfloat16 or an 8-bit floating point type.
    """
    bits = _without_name(array)
    if not bits.flags.writeable:
        bits = np.asarray(_Readable(bits)) if bits.size else bits.copy()
    tensor = torch.from_numpy(bits)
    named = _WITH_NAMES.get(array.dtype)
    return tensor if named is None else tensor.view(named)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns a tensor of the CPU that requires no gradient as an array in the same memory."""
    named = _WITHOUT_NUMPY.get(tensor.dtype)
    if named is not None:
        bits: NDArray[Any] = tensor.view(_INTEGERS[tensor.element_size()][0]).numpy()
        return bits.view(named)
    array: NDArray[Any] = tensor.numpy()
    return array


def _without_name(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a view of an array with a dtype that PyTorch takes from NumPy: integers in place of `_WITH_NAMES`."""
    return array.view(_INTEGERS[array.dtype.itemsize][1]) if array.dtype in _WITH_NAMES else array
