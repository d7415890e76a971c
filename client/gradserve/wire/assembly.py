"""Puts arrays together from the chunks of a payload."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PayloadError(ValueError):
    """A payload is longer or shorter than its header says."""


class Assembly:
    """Fills arrays, one after another, from the chunks of a payload."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Takes C-contiguous, writable arrays; their contents are undefined until `finish` returns."""
        self._buffers = [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
        self.expected_bytes = sum(len(buffer) for buffer in self._buffers)
        self.received_bytes = 0
        self._index = 0
        self._offset = 0

    def write(self, chunk: memoryview) -> None:
        """Adds the next bytes.

        Raises:
            PayloadError: The payload is longer than the arrays.
        """
        self.received_bytes += len(chunk)
        check_not_longer(self.expected_bytes, self.received_bytes)
        while chunk:
            buffer = self._buffers[self._index]
            count = min(len(chunk), len(buffer) - self._offset)
            buffer[self._offset : self._offset + count] = chunk[:count]
            chunk = chunk[count:]
            self._offset += count
            if self._offset == len(buffer):
                self._index += 1
                self._offset = 0

    def finish(self) -> None:
        """Checks that the payload is complete.

        Raises:
            PayloadError: The payload is shorter than the arrays.
        """
        check_complete(self.expected_bytes, self.received_bytes)


def check_not_longer(expected_bytes: int, received_bytes: int) -> None:
    """Checks what has been received of a payload so far.

    Raises:
        PayloadError: It is more than its header says.
    """
    if received_bytes > expected_bytes:
        raise PayloadError(
            f"expected a payload of {expected_bytes} bytes as the header says, got {received_bytes} or more"
        )


def check_complete(expected_bytes: int, received_bytes: int) -> None:
    """Checks what has been received of a payload at its end.

    Raises:
        PayloadError: It is not what its header says.
    """
    if received_bytes != expected_bytes:
        raise PayloadError(f"expected a payload of {expected_bytes} bytes as the header says, got {received_bytes}")
