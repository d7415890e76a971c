"""Digests of arrays: the same on servers and clients, see Version.digest in the protos."""

from collections.abc import Iterable

import xxhash

from gradserve_protocol.arrays import Array, buffer_of

BLOCK_BYTES = 1 << 20
"""The bytes of a component for one inner hash. So several threads can compute them."""
DIGEST_BYTES = 16


def block_hashes(array: Array) -> bytes:
    """Returns the hashes of a component's blocks, one after the other.

    Args:
        array: The component: little-endian, in C order.
    """
    buffer = buffer_of(array)
    return b"".join(
        [xxhash.xxh3_128_digest(buffer[start : start + BLOCK_BYTES]) for start in range(0, len(buffer), BLOCK_BYTES)]
    )


def digest_of(arrays: Iterable[Array]) -> bytes:
    """Returns the digest of components in their order: 16 bytes. Equal arrays have equal digests everywhere."""
    outer = xxhash.xxh3_128()
    for array in arrays:
        outer.update(block_hashes(array))
    return outer.digest()
