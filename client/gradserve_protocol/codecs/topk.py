"""The codec of the few largest values."""

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.codecs.codec import (
    Bytes,
    Codec,
    Floats,
    MalformedError,
    RandomBits,
    check_scales,
    finite_scales,
)

_KEPT = 64
"""The values of a chunk that are kept, if it has so many."""
_BITS = 12
_PARTS = np.array([0, 1, np.nan, -1], np.float32)
"""The values of two bits, as parts of the scale. 2 is not used."""
_SEARCHES = 4
"""The steps towards the scale with the least error; further ones change little."""


class TopK(Codec):
    """Chunks of 4096, of which the 64 values of the largest magnitude are kept: as 0, the scale, or its negative.

    All values of a shorter chunk of up to 64 are kept. Other values are 0.
    """

    name = "topk"
    number = 5
    block_size = 4096
    block_bytes = 4 + _KEPT // 2 * 3 + _KEPT // 4
    packs_versions = False

    def _tail_bytes(self, size: int) -> int:
        kept = min(_KEPT, size)
        return 4 + -(-kept // 2) * 3 + -(-kept // 4)

    def _encode(self, values: Floats, packed: Bytes, random: RandomBits | None) -> None:
        num_full, rest = divmod(values.size, self.block_size)
        split = num_full * self.block_size
        if num_full:
            out = packed[: num_full * self.block_bytes].reshape(num_full, self.block_bytes)
            self._encode_chunks(values[:split].reshape(num_full, self.block_size), out)
        if rest:
            self._encode_chunks(values[split:][None], packed[num_full * self.block_bytes :][None])

    def _encode_chunks(self, chunks: Floats, out: Bytes) -> None:
        size = chunks.shape[1]
        kept = min(_KEPT, size)
        magnitudes = np.abs(chunks)
        finite_scales(magnitudes, self.name)
        indices = np.argpartition(magnitudes, size - kept, axis=1)[:, size - kept :]
        indices.sort(axis=1)
        values = np.take_along_axis(chunks, indices, axis=1)
        scales, is_kept = _scales(np.abs(values))
        out[:, :4] = scales.astype("<f4").view(np.uint8)
        pairs = np.zeros((len(chunks), -(-kept // 2) * 2), np.uint32)
        pairs[:, :kept] = indices
        first, second = pairs[:, ::2], pairs[:, 1::2]
        ends = 4 + first.shape[1] * 3
        packed = out[:, 4:ends].reshape(len(chunks), -1, 3)
        packed[..., 0] = first & 255
        packed[..., 1] = first >> 8 | (second & 15) << 4
        packed[..., 2] = second >> 4
        out[:, 4:ends] = packed.reshape(len(chunks), -1)
        codes = np.zeros((len(chunks), -(-kept // 4) * 4), np.uint8)
        codes[:, :kept] = np.where(is_kept, np.where(np.signbit(values), 3, 1), 0)
        fours = codes.reshape(len(chunks), -1, 4)
        out[:, ends:] = fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6

    def _decode(self, packed: Bytes, values: Floats) -> None:
        values[:] = 0
        for chunks, blocks in self._parts(packed, values):
            scales, indices, codes, kept = _taken_apart(blocks, chunks.shape[1])
            decoded = _PARTS[codes[:, :kept]] * scales
            np.put_along_axis(chunks, indices[:, :kept].astype(np.int64), decoded, axis=1)

    def _check(self, packed: Bytes, size: int) -> None:
        for chunks, blocks in self._parts(packed, np.broadcast_to(np.float32(0), size)):
            size = chunks.shape[1]
            scales, indices, codes, kept = _taken_apart(blocks, size)
            check_scales(scales[:, 0])
            if indices[:, kept:].any() or codes[:, kept:].any():
                raise MalformedError(f"expected zeros after the last of {kept} values, got something else")
            own = indices[:, :kept]
            if (own[:, 1:] <= own[:, :-1]).any():
                raise MalformedError(
                    "expected indices that ascend in each chunk, got one that is not above the one before"
                )
            if own[:, -1].max() >= size:
                raise MalformedError(f"expected indices below {size}, got {own[:, -1].max()}")
            if (codes == 2).any():
                raise MalformedError("expected none of the patterns 10, got one")

    def _parts(self, packed: Bytes, values: Floats) -> list[tuple[Floats, Bytes]]:
        """Returns the full chunks and their bytes, and the chunk of fewer values and its bytes."""
        num_full, rest = divmod(values.size, self.block_size)
        split, split_bytes = num_full * self.block_size, num_full * self.block_bytes
        parts = []
        if num_full:
            full = packed[:split_bytes].reshape(num_full, self.block_bytes)
            parts.append((values[:split].reshape(num_full, self.block_size), full))
        if rest:
            parts.append((values[split:][None], packed[split_bytes:][None]))
        return parts


def _scales(magnitudes: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Returns the scale of each row, and which magnitudes are to be that scale rather than 0.

    Those of at least half of it are, and it is their mean: the least error for them.
    """
    scales: Floats = magnitudes.max(axis=1, keepdims=True)
    for _ in range(_SEARCHES):
        is_kept = magnitudes >= scales / 2
        counts = np.maximum(is_kept.sum(axis=1, keepdims=True), 1)
        # Each is at most the greatest: the sum of so many may overflow.
        scales = (np.where(is_kept, magnitudes, 0) / counts).sum(axis=1, keepdims=True, dtype=np.float32)
    return scales, magnitudes >= scales / 2


def _taken_apart(blocks: Bytes, size: int) -> tuple[Floats, NDArray[np.uint16], Bytes, int]:
    """Returns the scales, indices and codes of chunks, with padding; and the number of those that are not."""
    kept = min(_KEPT, size)
    ends = 4 + -(-kept // 2) * 3
    scales: Floats = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    threes = blocks[:, 4:ends].reshape(len(blocks), -1, 3).astype(np.uint16)
    indices = np.empty((len(blocks), threes.shape[1] * 2), np.uint16)
    indices[:, ::2] = threes[..., 0] | (threes[..., 1] & 15) << 8
    indices[:, 1::2] = threes[..., 1] >> 4 | threes[..., 2] << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)
    codes: Bytes = (blocks[:, ends:, None] >> shifts & np.uint8(3)).reshape(len(blocks), -1)
    return scales, indices, codes, kept
