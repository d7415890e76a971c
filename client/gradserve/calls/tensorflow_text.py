"""How TensorFlow writes dtypes, shapes and attributes in its messages."""

from collections.abc import Sequence

from gradserve.errors import InvalidArgumentError
from gradserve.wire.dtypes import DType


def dtype_text(dtype: DType) -> str:
    """Returns a dtype as TensorFlow writes it."""
    return {"float16": "half", "float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as TensorFlow writes it."""
    return f"[{','.join(map(str, shape))}]"


def check_attribute(value: str, name: str, allowed: Sequence[str], *, field: str | None = None) -> None:
    """Checks the value of an attribute as TensorFlow writes it, e.g. '"MEAN"' or 'float'.

    Raises:
        InvalidArgumentError: It is none of those allowed. `field` is that of the error, if not the attribute.
    """
    if value not in allowed:
        raise InvalidArgumentError(
            f"Value for attr '{name}' of {value} is not in the list of allowed values: {', '.join(allowed)}",
            field=field or name,
        )
