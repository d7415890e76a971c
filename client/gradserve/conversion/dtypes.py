"""Dtypes: NumPy's, and those of other libraries by their names."""

from typing import Any

import numpy as np

from gradserve.array_like import DTypeLike
from gradserve.conversion.argument import Argument, described
from gradserve.wire.dtypes import KNOWN_NAMES, DType, parse_dtype


def as_dtype(value: DTypeLike, argument: Argument) -> DType:
    """Returns the NumPy dtype that a value stands for.

    Raises:
        InvalidArgumentError: It stands for none, or for one that tensors cannot have.
    """
    named: Any = value if isinstance(value, str | type | np.dtype) else name_of(value)
    try:
        return parse_dtype(_without_library(named) if isinstance(named, str) else named)
    except (TypeError, ValueError):
        pass
    got = named if isinstance(named, str | np.dtype) else described(value)
    raise argument.error_saying(f"a dtype out of {KNOWN_NAMES}", str(got))


def name_of(dtype: object) -> str | None:
    """Returns the name of a dtype of any library; None for what is no dtype."""
    name = getattr(dtype, "name", None)
    if isinstance(name, str):
        return name
    # torch.float32 has no name but this one.
    return str(dtype) if "dtype" in type(dtype).__name__.lower() else None


def _without_library(name: str) -> str:
    return name.rpartition(".")[2]
