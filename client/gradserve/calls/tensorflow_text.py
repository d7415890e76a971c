"""Dtypes, shapes and attributes as TensorFlow writes them in its messages."""

from collections.abc import Sequence

from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text
from gradserve.errors import InvalidArgumentError
from gradserve.wire.arrays import DType


def dtype_text(dtype: DType) -> str:
    """Returns a dtype as TensorFlow writes it."""
    return {"float16": "half", "float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as TensorFlow writes it."""
    return f"[{','.join(map(str, shape))}]"


def check_text_attribute(value: str, name: str, allowed: Sequence[str]) -> None:
    """Checks the value of a text attribute.

    Raises:
        InvalidArgumentError: It is not text, or not one of the allowed values.
    """
    text = as_text(value, Argument(name))
    check_attribute(f'"{text}"', name, [f'"{each}"' for each in allowed])


def check_attribute(value: str, name: str, allowed: Sequence[str], *, field: str | None = None) -> None:
    """Checks the value of an attribute as TensorFlow writes it, e.g. '"MEAN"' or 'float'.

    Raises:
        InvalidArgumentError: It is not allowed. `field` is the error's, by default the attribute's name.
    """
    if value not in allowed:
        raise InvalidArgumentError(
            f"Value for attr '{name}' of {value} is not in the list of allowed values: {', '.join(allowed)}",
            field=field or name,
        )
