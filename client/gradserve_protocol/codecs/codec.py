"""The base of all codecs: packs in pieces that stay in the cache, unpacks, and refuses other bytes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.arrays import Array

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
PIECE = 1 << 15
"""The values that are packed at a time, a multiple of every block: they and intermediate results stay in the cache."""


class MalformedError(ValueError):
    """Bytes that are not the packed form of so many values."""


class UnpackableError(ValueError):
    """A value that a codec cannot represent."""


class RandomBits:
    """Random bits for stochastic rounding: the same seed gives the same bits, with every version of NumPy."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.PCG64(seed)

    def take(self, count: int) -> NDArray[np.uint32]:
        """Returns the next `count` numbers of 32 bits, of which an odd one more is thrown away."""
        raw = self._generator.random_raw(-(-count // 2))
        return np.asarray(raw, "<u8").view(np.uint32)[:count]


class Codec(ABC):
    """A packed form of arrays. Without state, so safe to use from several threads.

    Attributes:
        name: Its name.
        number: Its number in messages and for kernels.
        block_size: The number of values that are packed together; the last block may have fewer.
        block_bytes: The bytes of a full block.
        keeps_error: Whether it loses so much that senders should add the error of an update to their next one.
        packs_versions: Whether parameters may be read with it.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    block_size: ClassVar[int]
    block_bytes: ClassVar[int]
    keeps_error: ClassVar[bool] = True
    packs_versions: ClassVar[bool] = True

    def num_bytes(self, size: int) -> int:
        """Returns the length of the packed form of `size` values."""
        num_blocks, rest = divmod(size, self.block_size)
        return num_blocks * self.block_bytes + (self._tail_bytes(rest) if rest else 0)

    def encode(self, values: Array, random: RandomBits | None = None) -> Bytes:
        """Packs an array of floating-point numbers.

        Args:
            values: The array.
            random: The random bits of a codec that rounds stochastically; None to round to the nearest number.

        Raises:
            UnpackableError: A value is infinite or NaN, or too large.
        """
        flat = values.reshape(-1)
        packed = np.empty(self.num_bytes(flat.size), np.uint8)
        with np.errstate(all="ignore"):
            for begin in range(0, flat.size, PIECE):
                piece = flat[begin : begin + PIECE].astype(np.float32, copy=False)
                start = begin // self.block_size * self.block_bytes
                self._encode(piece, packed[start : start + self.num_bytes(piece.size)], random)
        return packed

    def decode(self, packed: Bytes, size: int) -> Floats:
        """Unpacks `size` values.

        Raises:
            MalformedError: The bytes are not the packed form of so many values.
        """
        self.check(packed, size)
        values = np.empty(size, np.float32)
        for start, begin in self._starts(size):
            piece = values[begin : begin + PIECE]
            self._decode(packed[start : start + self.num_bytes(piece.size)], piece)
        return values

    def pieces(self, packed: Bytes, size: int) -> Iterator[tuple[int, Floats]]:
        """Unpacks `size` values, of bytes that have passed `check`, piece by piece.

        Yields:
            The place of the first value, and values that are valid until the next piece.
        """
        values = np.empty(min(PIECE, size), np.float32)
        for start, begin in self._starts(size):
            piece = values[: size - begin]
            self._decode(packed[start : start + self.num_bytes(piece.size)], piece)
            yield begin, piece

    def check(self, packed: Bytes, size: int) -> None:
        """Checks that bytes are the packed form of `size` values, so that they can be unpacked without another look.

        Raises:
            MalformedError: They are not.
        """
        if packed.size != (expected := self.num_bytes(size)):
            raise MalformedError(f"expected {expected} bytes for {size} values as {self.name}, got {packed.size}")
        for start, begin in self._starts(size):
            count = min(PIECE, size - begin)
            self._check(packed[start : start + self.num_bytes(count)], count)

    def is_finite(self, packed: Bytes) -> bool:
        """Returns whether all values of a packed form, which has passed `check`, are finite."""
        return True

    def _starts(self, size: int) -> Iterator[tuple[int, int]]:
        """Yields the first byte and the first value of each piece."""
        for begin in range(0, size, PIECE):
            yield begin // self.block_size * self.block_bytes, begin

    @abstractmethod
    def _tail_bytes(self, size: int) -> int:
        """Returns the bytes of a block of fewer values."""

    @abstractmethod
    def _encode(self, values: Floats, packed: Bytes, random: RandomBits | None) -> None:
        """Packs at most PIECE values into bytes."""

    @abstractmethod
    def _decode(self, packed: Bytes, values: Floats) -> None:
        """Unpacks at most PIECE values from checked bytes."""

    @abstractmethod
    def _check(self, packed: Bytes, size: int) -> None:
        """Checks bytes of the right length for at most PIECE values."""


def finite_scales(magnitudes: Floats, name: str) -> Floats:
    """Returns the greatest magnitude of each row.

    Raises:
        UnpackableError: A magnitude is infinite or NaN.
    """
    scales: Floats = magnitudes.max(axis=1)
    if not np.isfinite(scales).all():
        raise UnpackableError(f"expected finite values, which {name} can represent, got infinity or NaN")
    return scales


def check_scales(scales: Array) -> None:
    """Checks the scales of packed blocks.

    Raises:
        MalformedError: One is negative, infinite or NaN.
    """
    if not (np.isfinite(scales).all() and not np.signbit(scales).any()):
        index = int(np.argmin(np.isfinite(scales) & ~np.signbit(scales)))
        raise MalformedError(f"expected finite scales of at least 0, got {scales[index]}")
