"""Sharded accumulators for tests: small ones are divided, too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

import gradserve
from gradserve.calls.accumulators.sharding import shard
from gradserve_protocol import placement
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of

WAYS: Sequence[Any] = ("grpc", "bulk", "shared_memory")
MODEL = {
    "kernel": gradserve.DenseSpec("float32", (7, 3)),
    "bias": gradserve.DenseSpec("float64", (3,)),
    "scale": gradserve.DenseSpec("float16", ()),
    "table": gradserve.SparseSpec("float32", (100, 2)),
}


@contextmanager
def small_pieces() -> Iterator[None]:
    """Divides components however small they are, until the end of the block."""
    with patch.object(placement, "SMALLEST_PIECE_BYTES", 1):
        yield


@contextmanager
def all_sharded() -> Iterator[None]:
    """Shards whatever can be, and divides it, until the end of the block."""
    with small_pieces(), patch.object(shard, "SMALLEST_BYTES", 0):
        yield


def gradient(number: float) -> dict[str, Any]:
    """Returns a gradient of MODEL whose elements grow with a number."""
    return {
        "kernel": number * np.arange(21, dtype=np.float32).reshape(7, 3),
        "bias": number * np.arange(3, dtype=np.float64),
        "scale": np.float16(number),
        "table": gradserve.IndexedSlices(np.full((2, 2), number, np.float32), np.array([3, 70 + int(number)])),
    }


def same(found: Any, expected: Any) -> None:
    """Asserts that a component of an average has these elements."""
    if isinstance(expected, gradserve.IndexedSlices):
        np.testing.assert_array_equal(found.indices, expected.indices)
        np.testing.assert_array_equal(found.values, expected.values)
        return
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.asarray(expected).dtype
    assert found.shape == np.shape(expected)


def shards_of(name: str, servers: Sequence[LocalServer]) -> list[bool]:
    """Returns which servers have an accumulator or a part of it."""
    found = []
    for address in addresses_of(servers):
        with gradserve.connect(address) as client:
            found.append(name in {info.name for info in client.list_accumulators()})
    return found
