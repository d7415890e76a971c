"""Codecs of blocks of consecutive values: bfloat16, and numbers of 8 or 4 bits with a scale for each block."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.arrays import BFLOAT16, Array, DType
from gradserve_protocol.codecs.codec import (
    Bytes,
    Codec,
    Floats,
    MalformedError,
    RandomBits,
    UnpackableError,
    check_scales,
    finite_scales,
)

_EXPONENT = np.uint16(0x7F80)
"""The bits of a bfloat16's exponent, which are all set only in infinities and NaN."""


class Bfloat16(Codec):
    """Values rounded to bfloat16, to nearest even. The only codec that has infinities and NaN."""

    name = "bf16"
    number = 1
    block_size = 1
    block_bytes = 2
    keeps_error = False

    def _tail_bytes(self, size: int) -> int:
        raise AssertionError("blocks have one value")

    def _encode(self, values: Floats, packed: Bytes, random: RandomBits | None) -> None:
        packed.view(BFLOAT16)[:] = values

    def _decode(self, packed: Bytes, values: Floats) -> None:
        np.left_shift(packed.view("<u2"), 16, out=values.view(np.uint32), dtype=np.uint32)

    def _check(self, packed: Bytes, size: int) -> None:
        """Any two bytes are a value."""

    def is_finite(self, packed: Bytes) -> bool:
        """Returns whether all values are finite."""
        return not ((np.frombuffer(packed, "<u2") & _EXPONENT) == _EXPONENT).any()


class Blocks(Codec):
    """Blocks of a scale, the greatest magnitude in the block, and a small number for each value.

    Attributes:
        scale_dtype: The dtype of scales.
    """

    scale_dtype: ClassVar[DType] = np.dtype("<f4")
    block_size = 256

    def _encode(self, values: Floats, packed: Bytes, random: RandomBits | None) -> None:
        num_blocks = -(-values.size // self.block_size)
        if values.size % self.block_size:
            padded = np.zeros(num_blocks * self.block_size, np.float32)
            padded[: values.size] = values
            whole = np.empty(num_blocks * self.block_bytes, np.uint8)
            self._encode(padded, whole, random)
            packed[:] = whole[: packed.size]
            return
        blocks, out = values.reshape(num_blocks, self.block_size), packed.reshape(num_blocks, self.block_bytes)
        magnitudes = np.abs(blocks)
        scales = finite_scales(magnitudes, self.name).astype(self.scale_dtype)
        if not np.isfinite(scales).all():
            limit = np.finfo(self.scale_dtype).max
            raise UnpackableError(f"expected magnitudes of at most {limit:g} for {self.name}, got {magnitudes.max():g}")
        head = self.scale_dtype.itemsize
        out[:, :head] = scales[:, None].view(np.uint8)
        wide = scales.astype(np.float32)[:, None]
        np.copyto(wide, 1.0, where=wide == 0)  # of zeros, or of values that are lost beside it
        self._encode_numbers(blocks, magnitudes, wide, out[:, head:], random)

    def _decode(self, packed: Bytes, values: Floats) -> None:
        num_blocks = -(-values.size // self.block_size)
        if values.size % self.block_size:
            whole = np.zeros(num_blocks * self.block_bytes, np.uint8)
            whole[: packed.size] = packed
            padded = np.empty(num_blocks * self.block_size, np.float32)
            self._decode(whole, padded)
            values[:] = padded[: values.size]
            return
        blocks = packed.reshape(num_blocks, self.block_bytes)
        head = self.scale_dtype.itemsize
        numbers = self._decode_numbers(blocks[:, head:])
        np.multiply(numbers, self._scales(blocks).astype(np.float32), out=values.reshape(num_blocks, self.block_size))

    def _check(self, packed: Bytes, size: int) -> None:
        num_full, rest = divmod(size, self.block_size)
        full = packed[: num_full * self.block_bytes].reshape(num_full, self.block_bytes)
        tail = packed[num_full * self.block_bytes :][None]
        head = self.scale_dtype.itemsize
        for blocks in (full, tail):
            if blocks.size:
                check_scales(self._scales(blocks)[:, 0])
                self._check_numbers(blocks[:, head:])
        if rest:
            self._check_padding(tail[0], rest)

    def _scales(self, blocks: Bytes) -> Array:
        return np.ascontiguousarray(blocks[:, : self.scale_dtype.itemsize]).view(self.scale_dtype)

    @abstractmethod
    def _encode_numbers(
        self, blocks: Floats, magnitudes: Floats, scales: Floats, out: Bytes, random: RandomBits | None
    ) -> None:
        """Packs the values of full blocks, whose scales are positive. May change the magnitudes."""

    @abstractmethod
    def _decode_numbers(self, packed: Bytes) -> Floats:
        """Returns the values of blocks, as parts of their scale."""

    @abstractmethod
    def _check_numbers(self, packed: Bytes) -> None:
        """Checks the numbers of blocks."""

    def _check_padding(self, block: Bytes, size: int) -> None:
        """Checks the last bytes of a block of fewer values."""


class Int8(Blocks):
    """Blocks of 256: a float32 scale s, and round(127 x / s) in two's complement for each value."""

    name = "int8"
    number = 2
    block_bytes = 4 + 256
    keeps_error = False

    def _tail_bytes(self, size: int) -> int:
        return 4 + size

    def _encode_numbers(
        self, blocks: Floats, magnitudes: Floats, scales: Floats, out: Bytes, random: RandomBits | None
    ) -> None:
        parts = np.divide(blocks, scales, out=magnitudes)
        np.multiply(parts, np.float32(127), out=parts)
        np.rint(parts, out=parts)
        out.view(np.int8)[:] = parts

    def _decode_numbers(self, packed: Bytes) -> Floats:
        return np.take(_PARTS_OF_127, packed)

    def _check_numbers(self, packed: Bytes) -> None:
        if (packed == 0x80).any():
            raise MalformedError("expected numbers from -127 to 127, got -128")


class Nibbles(Blocks):
    """Blocks with 4 bits for each value, the first of two in the low ones. The pattern 1000 is not used."""

    parts: ClassVar[Floats]
    """The value of each of the 16 patterns, as a part of the scale."""

    def __init__(self) -> None:
        both = np.arange(256)
        pairs = np.stack([self.parts[both & 15], self.parts[both >> 4]], axis=1)
        self._pairs: NDArray[np.uint64] = pairs.view(np.uint64)[:, 0]  # both values as one number: looked up faster
        self._is_used = (both & 15 != 8) & (both >> 4 != 8)

    def _tail_bytes(self, size: int) -> int:
        return self.scale_dtype.itemsize + -(-size // 2)

    def _encode_numbers(
        self, blocks: Floats, magnitudes: Floats, scales: Floats, out: Bytes, random: RandomBits | None
    ) -> None:
        pairs = self._nibbles(blocks, magnitudes, scales, random).view("<u2")
        out[:] = pairs | pairs >> 4

    def _decode_numbers(self, packed: Bytes) -> Floats:
        pairs: Floats = np.take(self._pairs, packed).view(np.float32)
        return pairs

    def _check_numbers(self, packed: Bytes) -> None:
        if not np.take(self._is_used, packed).all():
            raise MalformedError("expected none of the patterns 1000, got one")

    def _check_padding(self, block: Bytes, size: int) -> None:
        if size % 2 and block[-1] >> 4:
            raise MalformedError(f"expected zeros after the last of {size} values, got {block[-1] >> 4}")

    @abstractmethod
    def _nibbles(self, blocks: Floats, magnitudes: Floats, scales: Floats, random: RandomBits | None) -> Bytes:
        """Returns 4 bits for each value."""


class Int4(Nibbles):
    """Blocks of 32: a float16 scale s, and round(7 x / s) in two's complement for each value."""

    name = "int4"
    number = 3
    block_size = 32
    block_bytes = 2 + 16
    scale_dtype = np.dtype("<f2")
    parts = np.array([*range(8), *range(-8, 0)], np.float32) / np.float32(7)

    def _nibbles(self, blocks: Floats, magnitudes: Floats, scales: Floats, random: RandomBits | None) -> Bytes:
        parts = np.divide(blocks, scales, out=magnitudes)
        np.multiply(parts, np.float32(7), out=parts)
        np.rint(parts, out=parts)
        np.clip(parts, -7, 7, out=parts)  # the scale may have been rounded down
        return parts.astype(np.int8).view(np.uint8) & np.uint8(15)


class E3M0(Nibbles):
    """Blocks of 256: a float32 scale s, and for each value a sign and a level: 0, or s 2^(level - 7) for 1 to 7."""

    name = "e3m0"
    number = 4
    block_bytes = 4 + 128
    parts = np.array([sign * (2.0 ** (level - 7) if level else 0.0) for sign in (1, -1) for level in range(8)], "f4")

    def _nibbles(self, blocks: Floats, magnitudes: Floats, scales: Floats, random: RandomBits | None) -> Bytes:
        parts = np.divide(magnitudes, scales, out=magnitudes)
        bits: NDArray[np.uint32] = parts.view(np.uint32)
        if random is None:
            # The mantissa rounds the exponent up from 1.5 on; below the first level, from its half on.
            rounded = bits + np.uint32(1 << 22)
            np.right_shift(rounded, np.uint32(23), out=rounded)
            levels = rounded.view(np.int32)
            levels -= 127 - 7
            np.maximum(levels, (parts >= np.float32(2.0**-7)).view(np.int8), out=levels)
        else:
            chance = bits & np.uint32((1 << 23) - 1)
            levels = (bits >> np.uint32(23)).astype(np.int32) - (127 - 7)
            below = levels < 1
            np.copyto(chance, np.multiply(parts, np.float32(2.0 ** (6 + 23))), where=below, casting="unsafe")
            np.copyto(levels, 0, where=below)
            levels += (random.take(levels.size).reshape(levels.shape) >> np.uint32(9)) < chance
        np.clip(levels, 0, 7, out=levels)
        nibbles = levels.astype(np.uint8)
        nibbles |= (np.signbit(blocks) & (nibbles > 0)).view(np.uint8) << np.uint8(3)
        return nibbles


_PARTS_OF_127: Floats = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) / np.float32(127)
"""The value of each byte of an int8 block, as a part of the scale."""
