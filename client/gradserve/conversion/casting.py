"""Converts arrays and numbers to the dtype that a call needs."""

import numpy as np

from gradserve.conversion.arrays import as_array, has_dtype
from gradserve.conversion.gpu_arrays import as_tensor
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import Array, DoesNotFitError, DType, converted, is_real
from gradserve_protocol.gpu import GpuArray


def as_array_of(dtype: DType, value: object, argument: Argument) -> Array:
    """Returns a value that `as_array` takes as an array of a given dtype.

    Raises:
        InvalidArgumentError: See `as_array`; or it is complex; or a finite value would become infinite, or an integer
            another integer.
    """
    if type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
        return value
    array = as_array(value, argument)
    if not is_real(array.dtype):
        raise argument.error_saying("real numbers", f"an array of {array.dtype}")
    try:
        return converted(array, dtype)
    except DoesNotFitError as error:
        raise argument.error_saying(f"values of {dtype}", str(error)) from None


def as_array_or_numbers(value: object, default_dtype: DType, argument: Argument) -> Array:
    """Returns an array in its own dtype, and numbers, which have none, in a default one.

    Raises:
        InvalidArgumentError: See `as_array`, and for numbers `as_array_of`.
    """
    return as_array(value, argument) if has_dtype(value) else as_array_of(default_dtype, value, argument)


def as_tensor_of(dtype: DType, value: object, argument: Argument) -> Array | GpuArray:
    """Returns what `as_array_of` does; but an array of this dtype on a GPU is not copied to the host.

    Raises:
        InvalidArgumentError: See `as_array_of`.
    """
    if type(value) is np.ndarray:
        return as_array_of(dtype, value, argument)
    tensor = as_tensor(value, argument) if has_dtype(value) else value
    if isinstance(tensor, GpuArray):
        return tensor if tensor.dtype == dtype else as_array_of(dtype, tensor.to_host(), argument)
    return as_array_of(dtype, tensor, argument)


def as_tensor_or_numbers(value: object, default_dtype: DType, argument: Argument) -> Array | GpuArray:
    """Returns what `as_array_or_numbers` does; but an array on a GPU is not copied to the host.

    Raises:
        InvalidArgumentError: See `as_array_or_numbers`.
    """
    return as_tensor(value, argument) if has_dtype(value) else as_array_of(default_dtype, value, argument)
