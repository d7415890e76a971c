"""Converts arrays of any library, and numbers, to NumPy arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve.conversion.dlpack import array_from_dlpack, is_in_host_memory
from gradserve.conversion.dtypes import as_dtype, name_of
from gradserve_protocol.argument import READING_ERRORS, Argument
from gradserve_protocol.arrays import Array
from gradserve_protocol.errors import InvalidArgumentError

_NUMBERS = frozenset({bool, int, float, complex})
_ARRAY_PROTOCOLS = ("dtype", "__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__")
_NO_NUMBERS = frozenset("OSU")
"""The kinds of dtype that NumPy gives to anything but numbers: objects, bytes and text."""
_MAX_DIMENSIONS = 64
"""The most dimensions that NumPy takes."""
_EXPECTED = "an array or numbers"


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
    array = _read(value, argument, 0)
    return np.asarray(array, dtype=as_dtype(array.dtype, argument), order="C")


def has_dtype(value: object) -> bool:
    """Returns True if a value is an array with a dtype of its own, rather than numbers."""
    return any(hasattr(value, protocol) for protocol in _ARRAY_PROTOCOLS)


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
    """Reads an array by NumPy's protocols; by DLPack if these fail: PyTorch's bfloat16, or no `__array__`."""
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
    """Returns a copy in host memory of an array on a GPU, as its own library makes it: PyTorch, or CuPy and others."""
    if not hasattr(value, "cpu"):
        return np.asarray(value.get())
    on_host = value.cpu()
    try:
        return np.asarray(on_host)
    except TypeError:  # a dtype that NumPy does not know
        return array_from_dlpack(on_host)


def detached(value: Any) -> Any:
    """Returns a PyTorch tensor without what its memory does not show: gradients, conjugation, negation."""
    if getattr(value, "requires_grad", None) is True:
        value = value.detach()
    for method in ("resolve_conj", "resolve_neg"):
        if hasattr(value, method):
            value = getattr(value, method)()
    return value


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
