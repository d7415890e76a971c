"""Dtypes and shapes of tensors, and how TensorFlow writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from gradserve_server.errors import InvalidArgumentError

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

FLOATING = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
"""The floating dtypes, in the order of TensorFlow's messages."""

MOST_USUAL_FIRST = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
"""The floating dtypes, in the order in which kernels are prepared for them."""


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A dtype as TensorFlow writes it."""
    return {"float16": "half", "float32": "float", "float64": "double"}.get(dtype.name, dtype.name)


def widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of arithmetic: float32 for 16 bits, else the dtype itself."""
    return FLOAT32 if dtype.itemsize == 2 else dtype


def check_type_attribute(dtype: np.dtype[Any], field: str, allowed: Sequence[np.dtype[Any]] = FLOATING) -> None:
    """Checks the dtype that TensorFlow calls T, which is the dtype of the input `field`.

    Raises:
        InvalidArgumentError: The dtype is not allowed; the message is TensorFlow's.
    """
    if dtype not in allowed:
        known = ", ".join(map(dtype_text, allowed))
        raise InvalidArgumentError(
            f"Value for attr 'T' of {dtype_text(dtype)} is not in the list of allowed values: {known}", field=field
        )


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as TensorFlow writes it."""
    return f"[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @cached_property
    def num_bytes(self) -> int:
        """The size of the elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in the description of a tensor.

    Attributes:
        message: The message of the error.
        field: The path below the field of the tensor: ".shape"; empty for the tensor itself.
    """

    message: str
    field: str = ""


def num_bytes_of(specs: Sequence[TensorSpec]) -> int:
    """Returns the size of the elements of all tensors. For very many it takes long."""
    return sum([spec.num_bytes for spec in specs])
