"""Arrays and numbers in the dtype that a call needs."""

from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array, has_dtype
from gradserve.wire.dtypes import DType, is_real
from gradserve.wire.narrowing import DoesNotFitError, converted
from gradserve.wire.payload import Array


def as_array_of(dtype: DType, value: object, argument: Argument) -> Array:
    """Returns a value, as `as_array` takes it, as an array of a dtype.

    Raises:
        InvalidArgumentError: As `as_array`; or it is complex; or a value does not fit: it is finite and would become
            infinite, or it would become another integer.
    """
    array = as_array(value, argument)
    if not is_real(array.dtype):
        raise argument.error_saying("real numbers", f"an array of {array.dtype}")
    try:
        return converted(array, dtype)
    except DoesNotFitError as error:
        raise argument.error_saying(f"values of {dtype}", str(error)) from None


def as_array_or_numbers(value: object, default_dtype: DType, argument: Argument) -> Array:
    """Returns an array in the dtype that it has, and numbers, which have none, in a default one.

    Raises:
        InvalidArgumentError: As `as_array`, and numbers as `as_array_of`.
    """
    return as_array(value, argument) if has_dtype(value) else as_array_of(default_dtype, value, argument)
