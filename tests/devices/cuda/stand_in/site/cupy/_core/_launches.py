"""Work on arrays, which knows nothing of them but addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tests.devices.cuda.stand_in.gpu.ranges import Access, bytes_at

from .. import cuda
from .._machine import MACHINE


@dataclass(frozen=True)
class Layout:
    """Where the elements of an array are."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]

    def at(self) -> NDArray[Any]:
        """Returns the elements, as an array of NumPy."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        first = bytes_at(self.address, self.dtype.itemsize).view(self.dtype)
        return as_strided(first, self.shape, self.strides)

    def access(self, *, writes: bool) -> Access:
        """Returns what is used: everything from the first to the last element."""
        if 0 in self.shape:
            return Access(self.address, self.address, writes)
        steps = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        start = self.address + sum(step for step in steps if step < 0)
        return Access(start, self.address + sum(step for step in steps if step > 0) + self.dtype.itemsize, writes)


def launch(name: str, function: Callable[..., object], operands: Sequence[Any], *, writes: int) -> None:
    """Queues a function of arrays and numbers on the current stream; it writes to the first `writes` of them."""
    queue = MACHINE.queue(cuda.get_current_stream().ptr)
    values: list[Any] = []
    accesses = []
    for place, operand in enumerate(operands):
        layout = getattr(operand, "_layout", None)
        if layout is not None:
            if operand.device.id != queue.gpu:
                raise MACHINE.fault(f"{name} on GPU {queue.gpu} has an operand on GPU {operand.device.id}")
            accesses.append(layout.access(writes=place < writes))
            values.append(layout)
        elif isinstance(operand, np.ndarray) and operand.ndim == 0:
            values.append(operand.copy())
        elif isinstance(operand, np.generic | bool | int | float | complex):
            values.append(operand)
        else:
            raise TypeError(f"Unsupported type {type(operand)}")
    if any(access.end == access.start for access in accesses[:writes]):
        return

    def run() -> None:
        with np.errstate(all="ignore"):
            function(*(value.at() if isinstance(value, Layout) else value for value in values))

    MACHINE.issue(queue, name, accesses, run)
