"""Converts arguments of ops to tensors."""

from gradserve.conversion.argument import Argument
from gradserve.conversion.casting import as_tensor_or_numbers
from gradserve.conversion.handles import as_handle
from gradserve.results import TensorHandle, TensorLike
from gradserve.wire.arrays import AnyArray, DType


def as_op_input(
    value: TensorLike, default_dtype: DType, name: str, *, field: str | None = None
) -> AnyArray | TensorHandle:
    """Returns a value as an input of an op.

    Handles and arrays of any library keep their dtype. Numbers and sequences of numbers, which have none, get the
    default.

    Args:
        value: The input.
        default_dtype: The dtype of plain numbers.
        name: The name of the input.
        field: The field of an error; the name by default.

    Raises:
        InvalidArgumentError: It is neither an array nor numbers, or has a dtype that tensors cannot have.
    """
    if isinstance(value, TensorHandle):
        return as_handle(value, Argument(name, field))
    return as_tensor_or_numbers(value, default_dtype, Argument(name, field))
