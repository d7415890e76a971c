"""How gradients are divided among servers, and averages put together."""

from typing import Any

import numpy as np
import pytest

from gradserve.calls.accumulators.components import Component
from gradserve.calls.accumulators.sharding.shard import Parts
from gradserve.results import IndexedSlices
from gradserve_protocol.placement import Piece

FLOAT32 = np.dtype("float32")
COMPONENTS = [
    Component("w", FLOAT32, (6, 2), is_sparse=False),
    Component("b", FLOAT32, (2,), is_sparse=False),
    Component("t", FLOAT32, (-1, 2), is_sparse=True),
]
PLAN = {"w": [Piece(2, 1), Piece(0, 5)], "b": [Piece(2, 0)], "t": [Piece(1, 0)]}
ROWS = IndexedSlices(np.ones((1, 2), np.float32), np.array([3]))


class OnGpu:
    """An array that is not in host memory, and counts its copies there."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.dtype, self.shape, self.nbytes = array.dtype, array.shape, array.nbytes
        self.num_copies = 0

    def to_host(self) -> Any:
        self.num_copies += 1
        return self.array.copy()


@pytest.fixture
def parts() -> Parts:
    return Parts(COMPONENTS, PLAN)


def test_rows_are_views(parts: Parts) -> None:
    w, b = np.arange(12, dtype=np.float32).reshape(6, 2), np.ones(2, np.float32)
    divided: Any = parts.of_gradient({"w": w, "b": b, "t": ROWS})
    assert {server: list(values) for server, values in divided.items()} == {2: ["w", "b"], 0: ["w"], 1: ["t"]}
    assert divided[2]["b"] is b
    assert divided[1]["t"] is ROWS
    for server, rows in ((2, w[:1]), (0, w[1:])):
        np.testing.assert_array_equal(divided[server]["w"], rows)
        assert np.shares_memory(divided[server]["w"], w)
        assert divided[server]["w"].flags.c_contiguous


def test_arrays_of_a_gpu_are_copied_once_if_they_are_divided(parts: Parts) -> None:
    w, b = OnGpu(np.ones((6, 2), np.float32)), OnGpu(np.ones(2, np.float32))
    divided: Any = parts.of_gradient({"w": w, "b": b, "t": ROWS})  # type: ignore[dict-item]
    assert divided[2]["b"] is b
    assert [len(divided[server]["w"]) for server in (2, 0)] == [1, 5]
    assert (w.num_copies, b.num_copies) == (1, 0)


def test_what_servers_have(parts: Parts) -> None:
    assert parts.servers == [0, 1, 2]
    assert [parts.num_bytes(server) for server in parts.servers] == [40, 0, 16]


@pytest.mark.parametrize("read_only", [True, False])
def test_an_average_is_put_together(parts: Parts, *, read_only: bool) -> None:
    b = np.ones(2, np.float32)
    received: Any = {
        0: {"w": np.full((5, 2), 7, np.float32)},
        1: {"t": ROWS},
        2: {"w": np.full((1, 2), 9, np.float32), "b": b},
    }
    whole: Any = parts.put_together(received, read_only=read_only)
    assert whole["w"].tolist() == [[9, 9], *[[7, 7]] * 5]
    assert whole["w"].flags.writeable is not read_only
    assert whole["b"] is b
    assert whole["t"] is ROWS
