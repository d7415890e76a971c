"""Converts numbers, and arrays and dtypes of any library, to those of NumPy.

Reads arrays by NumPy's protocols and by DLPack (https://dmlc.github.io/dlpack), in which a capsule holds a pointer to a
tensor in some library's memory; DLPack also brings the one dtype that NumPy does not read: bfloat16.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve.results import DTypeLike
from gradserve_protocol.argument import READING_ERRORS, Argument, described
from gradserve_protocol.arrays import BFLOAT16, KNOWN_DTYPES, KNOWN_NAMES, Array, DType, parse_dtype
from gradserve_protocol.errors import InvalidArgumentError

_NUMBERS = frozenset({bool, int, float, complex})
_ARRAY_PROTOCOLS = ("dtype", "__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__")
_NO_NUMBERS = frozenset("OSU")
"""The kinds of dtype that NumPy gives to anything but numbers: objects, bytes and text."""
_MAX_DIMENSIONS = 64
"""The most dimensions that NumPy takes."""
_EXPECTED = "an array or numbers"
_CAPSULE_NAME = b"dltensor"
_UNSIGNED, _BFLOAT = 1, 4
_HOST_MEMORY = frozenset({1, 3, 11, 13})
"""The device types of the CPU, and of memory pinned or managed by CUDA or ROCm."""
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def as_array(value: object, argument: Argument) -> Array:
    """Returns a value as a little-endian, C-contiguous array of a dtype that tensors can have.

    Copies only if needed. Takes numbers, in lists of any depth, and arrays of NumPy and of every library whose arrays
    have `__array__` or `__dlpack__`. A tensor of PyTorch that requires a gradient is detached.

    Args:
        value: The array or numbers.
        argument: The argument they were passed as.

    Raises:
        InvalidArgumentError: It is something else, or a masked array; or its dtype is one that tensors cannot have; or
            it is in the memory of a GPU, and its library does not copy it from there by itself.
    """
    if type(value) is np.ndarray and value.dtype in KNOWN_DTYPES and value.flags.c_contiguous:
        return value
    array = _read(value, argument, 0)
    return np.asarray(array, dtype=as_dtype(array.dtype, argument), order="C")


def has_dtype(value: object) -> bool:
    """Returns True if a value is an array with a dtype of its own, rather than numbers."""
    return isinstance(value, np.ndarray) or any(hasattr(value, protocol) for protocol in _ARRAY_PROTOCOLS)


def as_dtype(value: DTypeLike, argument: Argument) -> DType:
    """Returns the NumPy dtype for a value.

    Raises:
        InvalidArgumentError: It is not a dtype, or one that tensors cannot have.
    """
    named: Any = value if isinstance(value, str | type | np.dtype) else name_of(value)
    try:
        return parse_dtype(_without_library(named) if isinstance(named, str) else named)
    except (TypeError, ValueError):
        pass
    got = named if isinstance(named, str | np.dtype) else described(value)
    raise argument.error_saying(f"a dtype out of {KNOWN_NAMES}", str(got))


def name_of(dtype: object) -> str | None:
    """Returns the name of a dtype of any library; None if it is not a dtype."""
    name = getattr(dtype, "name", None)
    if isinstance(name, str):
        return name
    # torch.float32 has its name only in str().
    return str(dtype) if "dtype" in type(dtype).__name__.lower() else None


def detached(value: Any) -> Any:
    """Returns a PyTorch tensor whose memory holds its values: without gradients, lazy conjugation or negation."""
    if getattr(value, "requires_grad", None) is True:
        value = value.detach()
    for method in ("resolve_conj", "resolve_neg"):
        if hasattr(value, method):
            value = getattr(value, method)()
    return value


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


def is_in_host_memory(producer: Any) -> bool:
    """Returns True if the CPU can read the memory of a tensor with `__dlpack__`."""
    return int(producer.__dlpack_device__()[0]) in _HOST_MEMORY


def tensor_in(capsule: Any) -> DLTensor:
    """Returns the description of the tensor in a capsule; it is valid as long as the capsule."""
    return DLTensor.from_address(_get_pointer(capsule, _CAPSULE_NAME))


def array_from_dlpack(producer: Any) -> Array:
    """Returns a tensor with `__dlpack__` of any library as an array, which shares its memory unless it is on a GPU.

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


class _Exported:
    """A capsule in the form that NumPy accepts."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def _without_library(name: str) -> str:
    return name.rpartition(".")[2]


def _read(value: Any, argument: Argument, depth: int) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise argument.error_saying(_EXPECTED, "a masked array; .filled() replaces the masked elements")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, list | tuple):
        return _read_sequence(value, argument, depth)
    if type(value) in _NUMBERS:
        return _read_numbers(value, argument)
    return _read_foreign(value, argument)


def _read_sequence(values: list[Any] | tuple[Any, ...], argument: Argument, depth: int) -> Array:
    if depth == _MAX_DIMENSIONS:
        raise argument.error_saying(f"lists in at most {_MAX_DIMENSIONS} levels", "more")
    if not _NUMBERS.issuperset(map(type, values)):
        values = [each if type(each) in _NUMBERS else _read(each, argument, depth + 1) for each in values]
    try:
        return _read_numbers(values, argument)
    except ValueError:
        raise argument.error_saying(_EXPECTED, "rows of different lengths") from None


def _read_numbers(values: Any, argument: Argument) -> Array:
    array = np.asarray(values)
    if array.dtype != object:
        return array
    try:
        return np.asarray(values, np.float64)  # integers of more than 64 bits
    except OverflowError:
        raise argument.error("numbers that fit into a float64", values) from None


def _read_foreign(value: Any, argument: Argument) -> Array:
    """Reads an array by NumPy's protocols, or by DLPack if these fail: PyTorch's bfloat16, or no `__array__`."""
    dtype = name_of(getattr(value, "dtype", None))
    if dtype is not None:
        as_dtype(dtype, argument)
    reason: Exception | None = None
    ways: list[Callable[[Any], Array]] = [np.asarray]
    if hasattr(value, "__dlpack__"):
        ways.append(array_from_dlpack)
    if _is_in_device_memory(value):
        ways.append(_from_gpu)
    for read in ways:
        try:
            array = read(detached(value))
        except READING_ERRORS as error:
            reason = reason or error
        else:
            if array.dtype.kind not in _NO_NUMBERS:
                return array
    raise _unreadable(value, argument, reason)


def _from_gpu(value: Any) -> Array:
    """Copies an array from a GPU to host memory through its own library: PyTorch, or CuPy and others."""
    if not hasattr(value, "cpu"):
        return np.asarray(value.get())
    on_host = value.cpu()
    try:
        return np.asarray(on_host)
    except TypeError:  # a dtype that NumPy does not know
        return array_from_dlpack(on_host)


def _unreadable(value: Any, argument: Argument, reason: Exception | None) -> InvalidArgumentError:
    if reason is None:
        return argument.error(_EXPECTED, value)
    kind, why = type(value).__qualname__, str(reason).partition("\n")[0]
    if _is_in_device_memory(value):
        device = getattr(value, "device", "a GPU")
        return argument.error_saying(
            "an array in the memory of the host", f"{kind} on {device}; copy it first, for example with .cpu(): {why}"
        )
    return argument.error_saying(_EXPECTED, f"{kind}, which cannot be read: {why}")


def _is_in_device_memory(value: Any) -> bool:
    try:
        if isinstance(value, type):
            return False
        if hasattr(value, "__dlpack_device__"):
            return not is_in_host_memory(value)
        return hasattr(value, "__cuda_array_interface__")
    except (TypeError, ValueError, RuntimeError, BufferError):  # not one device, or one that DLPack does not know
        return False
