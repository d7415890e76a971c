"""Digests of versions."""

from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from gradserve_protocol.digest import BLOCK_BYTES, digest_of

NOTHING = "99aa06d3014798d86001c324468d497f"
"""XXH3 of no bytes, 128 bits, as its specification says."""
LARGE = np.arange(BLOCK_BYTES // 4 + 1, dtype=np.float32)


def hashed(*parts: bytes) -> bytes:
    return xxhash.xxh3_128(b"".join(parts)).digest()


@pytest.mark.parametrize("arrays", [[], [np.zeros(0)], [np.zeros((0, 3)), np.zeros(0)]])
def test_nothing(arrays: list[NDArray[Any]]) -> None:
    assert digest_of(arrays).hex() == NOTHING


def test_components_have_blocks_of_their_own() -> None:
    data = LARGE.tobytes()
    blocks = [hashed(data[:BLOCK_BYTES]), hashed(data[BLOCK_BYTES:])]
    assert digest_of([LARGE]) == hashed(*blocks)
    assert digest_of([LARGE[:1], LARGE]) == hashed(hashed(bytes(4)), *blocks)
    assert digest_of([np.full((), 0.5)]) == hashed(hashed(np.float64(0.5).tobytes()))


def test_a_known_digest() -> None:
    arrays = [np.arange(6, dtype="<f4").reshape(2, 3), np.array([1.0, -2.0], "<f8")]
    assert digest_of(arrays).hex() == "47893502a977155521120fef42668ecc"
    assert digest_of(arrays[::-1]) != digest_of(arrays)
