"""Converts arrays and numbers to the dtype that a call needs."""

import numpy as np

from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array, has_dtype
from gradserve.wire.dtypes import DType, is_real
from gradserve.wire.narrowing import DoesNotFitError, converted
from gradserve.wire.payload import Array


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
