"""How matrices are multiplied."""

from typing import Any

import numpy as np

COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TBD, COMPUTE_TYPE_PEDANTIC = 0, -1, 2
_compute_types: dict[str, int] = {}


def set_compute_type(dtype: Any, compute_type: int) -> None:
    _compute_types[np.dtype(dtype).char] = compute_type


def get_compute_type(dtype: Any) -> int:
    return _compute_types.get(np.dtype(dtype).char, COMPUTE_TYPE_TBD)
