"""Converts dtypes of any library to NumPy's."""

from typing import Any

import numpy as np

from gradserve.results import DTypeLike
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.arrays import KNOWN_NAMES, DType, parse_dtype


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


def _without_library(name: str) -> str:
    return name.rpartition(".")[2]
