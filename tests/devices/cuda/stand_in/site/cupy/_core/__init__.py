"""CuPy's core."""

from . import _routines_linalg
from ._routines_linalg import get_compute_type, set_compute_type
from .core import ndarray

__all__ = ["_routines_linalg", "get_compute_type", "ndarray", "set_compute_type"]
