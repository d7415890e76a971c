"""Reads DLPack tensors, including the one dtype that NumPy does not read: bfloat16.

In the standard, https://dmlc.github.io/dlpack, a capsule holds a pointer to a tensor in some library's memory.
"""

import ctypes
from typing import Any

import numpy as np

from gradserve_protocol.arrays import BFLOAT16, Array

_CAPSULE_NAME = b"dltensor"
_UNSIGNED, _BFLOAT = 1, 4
_HOST_MEMORY = frozenset({1, 3, 11, 13})
"""The device types of the CPU, and of memory pinned or managed by CUDA or ROCm."""

_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class DLTensor(ctypes.Structure):
    """The description of a tensor, with which the structure in a capsule begins; without strides for the C order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Exported:
    """A capsule in a form that NumPy takes."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def is_in_host_memory(producer: Any) -> bool:
    """Returns True if a tensor with `__dlpack__` says that the CPU can read its memory."""
    return int(producer.__dlpack_device__()[0]) in _HOST_MEMORY


def tensor_in(capsule: Any) -> DLTensor:
    """Returns the description of the tensor in a capsule, which is valid as long as the capsule."""
    return DLTensor.from_address(_get_pointer(capsule, _CAPSULE_NAME))


def array_from_dlpack(producer: Any) -> Array:
    """Returns the tensor of any library with `__dlpack__` as an array, which shares memory unless it is a GPU's.

    Raises:
        Exception: Any exception of the library or of NumPy for a tensor that cannot be read.
    """
    if not is_in_host_memory(producer):
        copied: Array = np.from_dlpack(producer, device="cpu")
        return copied
    capsule = producer.__dlpack__()
    tensor = tensor_in(capsule)
    is_bfloat16 = (tensor.type_code, tensor.type_bits) == (_BFLOAT, BFLOAT16.itemsize * 8)
    if is_bfloat16:
        # The description of the tensor belongs to its receiver. NumPy, the next receiver, knows unsigned integers.
        tensor.type_code = _UNSIGNED
    array: Array = np.from_dlpack(_Exported(capsule, producer.__dlpack_device__()))
    return array.view(BFLOAT16) if is_bfloat16 else array
