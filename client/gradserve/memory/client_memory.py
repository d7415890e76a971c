"""The memory of a client's arrays."""

import contextlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.errors import ResourceExhaustedError
from gradserve.memory.pool import BufferPool
from gradserve.memory.regions import RegionPool


class ClientMemory:
    """The memory that a client receives into, and that it shares with servers. Safe to use from several threads.

    Attributes:
        received: The memory of arrays in replies.
        regions: The memory that is shared; None if the client shares none, or the system cannot.
    """

    def __init__(self, *, shares: bool, kept_bytes: int) -> None:
        """Takes whether to share memory with servers, and how much unused memory of each kind to keep."""
        self.received = BufferPool(kept_bytes)
        self.regions = RegionPool(kept_bytes) if shares and hasattr(os, "memfd_create") else None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array that a server on this machine reads in place; otherwise an ordinary one.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        if self.regions is not None:
            # Without it, there are too many open files, or too little memory for regions.
            with contextlib.suppress(MemoryError, ValueError):
                return self.regions.empty(shape, dtype)
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise ResourceExhaustedError(f"no memory for shape {list(shape)} of {dtype}: {error}") from None
