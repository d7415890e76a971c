"""Arrays as tensors: their dtypes, conversions between these, and their bytes. Knows nothing of protobuf."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

DType: TypeAlias = np.dtype[Any]
Array: TypeAlias = NDArray[Any]
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, DType] = {
    str(dtype): dtype
    for dtype in (
        np.dtype("<f2"),
        BFLOAT16,
        *map(np.dtype, ("<f4", "<f8", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "?", "<c8", "<c16")),
    )
}
"""The dtypes that tensors can have, by name."""
KNOWN_NAMES = ", ".join(DTYPES)
KNOWN_DTYPES = frozenset(DTYPES.values())
HOST_ARRAYS = (np.ndarray, np.generic)
"""The types of arrays in host memory: some NumPy functions return scalars instead of arrays without dimensions."""


def parse_dtype(dtype: DTypeLike) -> DType:
    """Returns the little-endian NumPy dtype that `dtype` names.

    Raises:
        TypeError: Tensors cannot have this dtype.
    """
    if dtype is None:  # which NumPy takes for float64
        raise TypeError(f"expected a dtype out of {KNOWN_NAMES}; got None")
    parsed = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    parsed = parsed.newbyteorder("<")
    if parsed not in KNOWN_DTYPES:
        raise TypeError(f"expected a dtype out of {KNOWN_NAMES}; got {parsed}")
    return parsed


def is_real(dtype: DType) -> bool:
    """Returns True for dtypes of real numbers, and for bool."""
    return dtype.kind != "c"


def buffer_of(array: Array) -> memoryview:
    """Returns the bytes of a C-contiguous array without copying them."""
    return array.reshape(-1).view(np.uint8).data


class ElsewhereArray(Protocol):
    """An array outside host memory, C-contiguous, of a dtype that tensors can have."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        ...

    def to_host(self) -> Array:
        """Returns a copy in host memory."""
        ...


AnyArray: TypeAlias = Array | ElsewhereArray
"""An array that can be sent, wherever it is."""


def host_array(array: AnyArray) -> Array:
    """Returns an array in host memory: the array itself if it is there."""
    return array if isinstance(array, HOST_ARRAYS) else array.to_host()


class DoesNotFitError(ValueError):
    """A value that a dtype cannot represent, even rounded."""


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns a real array as a C-contiguous array of another dtype; the array itself if it is one already.

    Floating-point dtypes round. NaN and infinities are kept.

    Raises:
        DoesNotFitError: A finite value would become infinite, or an integer would change; the message gives the value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.asarray(array, dtype, order="C")
    if dtype.kind in "iu":
        lost = result != array
    elif _largest(array.dtype) > _largest(dtype):
        lost = np.isinf(result)
        if lost.any():
            lost &= np.isfinite(array)
    else:
        return result
    if lost.any():
        index = tuple(map(int, np.unravel_index(int(np.argmax(lost)), lost.shape)))
        raise DoesNotFitError(text_of(array[index], index, dtype))
    return result


def text_of(number: np.generic, index: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Describes an element that does not fit into a dtype."""
    where = f" at {list(index)}" if index else ""
    return f"{_text(number)}{where}, which does not fit into {dtype}"


class PayloadError(ValueError):
    """A payload is longer or shorter than its header says."""


class Assembly:
    """Fills arrays in order from the chunks of a payload."""

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
    """Checks the length of a payload while it arrives.

    Raises:
        PayloadError: It is longer than its header says.
    """
    if received_bytes > expected_bytes:
        raise PayloadError(
            f"expected a payload of {expected_bytes} bytes as the header says, got {received_bytes} or more"
        )


def check_complete(expected_bytes: int, received_bytes: int) -> None:
    """Checks the length of a payload that has ended.

    Raises:
        PayloadError: It is longer or shorter than its header says.
    """
    if received_bytes != expected_bytes:
        raise PayloadError(f"expected a payload of {expected_bytes} bytes as the header says, got {received_bytes}")


@cache
def _largest(dtype: np.dtype[Any]) -> float:
    """Returns the largest finite number of a dtype."""
    if dtype.kind == "b":
        return 1.0
    if dtype.kind in "iu":
        return float(np.iinfo(dtype).max)
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _text(number: np.generic) -> str:
    return str(number) if isinstance(number, np.integer) else f"{float(number):g}"
