"""Digests of arrays: the same on servers and clients, see Version.digest in the protos."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import xxhash

from gradserve_protocol.arrays import Array, buffer_of

BLOCK_BYTES = 1 << 20
"""The bytes of a component for one inner hash. So several threads can compute them."""
_PIECE_BYTES = 8 * BLOCK_BYTES
"""The most bytes that one function of `digest_of` hashes, so that threads rarely need the GIL, and all have some."""

RunAll = Callable[[Sequence[Callable[[], object]]], object]
"""Calls independent functions, in any threads; returns when all have returned."""


def digest_of(arrays: Iterable[Array], run_all: RunAll | None = None) -> bytes:
    """Returns the digest of components in their order: 16 bytes. Equal arrays have equal digests everywhere.

    Args:
        arrays: The components: little-endian, in C order.
        run_all: Hashes parts of large components in several threads; None for this thread alone.
    """
    pieces = [
        buffer[start : start + _PIECE_BYTES]
        for buffer in map(buffer_of, arrays)
        for start in range(0, len(buffer), _PIECE_BYTES)
    ]
    if run_all is None or len(pieces) < 2 or sum(map(len, pieces)) < _PIECE_BYTES:
        return xxhash.xxh3_128_digest(b"".join(map(_hashes, pieces)))
    hashes = [b""] * len(pieces)

    def fill(first: int, end: int) -> None:
        hashes[first:end] = map(_hashes, pieces[first:end])

    run_all([partial(fill, *ends) for ends in _groups(pieces)])
    return xxhash.xxh3_128_digest(b"".join(hashes))


def _groups(pieces: Sequence[memoryview]) -> Iterable[tuple[int, int]]:
    """Yields the first and the last piece, exclusive, of groups of about `_PIECE_BYTES`."""
    first = num_bytes = 0
    for index, piece in enumerate(pieces):
        if num_bytes and num_bytes + len(piece) > _PIECE_BYTES:
            yield first, index
            first, num_bytes = index, 0
        num_bytes += len(piece)
    yield first, len(pieces)


def _hashes(buffer: memoryview) -> bytes:
    return b"".join(
        [xxhash.xxh3_128_digest(buffer[start : start + BLOCK_BYTES]) for start in range(0, len(buffer), BLOCK_BYTES)]
    )
