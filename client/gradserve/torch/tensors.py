"""Tensors and arrays that share memory."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.wire.dtypes import BFLOAT16


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
        array: An array of a dtype that both libraries have, or of bfloat16.
    """
    bits = _without_name(array)
    if not bits.flags.writeable:
        bits = np.asarray(_Readable(bits)) if bits.size else bits.copy()
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns a tensor of the CPU that requires no gradient as an array in the same memory."""
    if tensor.dtype is torch.bfloat16:
        bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: NDArray[Any] = tensor.numpy()
    return array


def _without_name(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a view of an array with a dtype that PyTorch takes from NumPy: bfloat16 as integers."""
    return array.view(np.int16) if array.dtype == BFLOAT16 else array
