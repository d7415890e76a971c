"""What a worker sees in regions that it has mapped, while others send gradients; see docs/sockets_regions.md."""

import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest

import gradserve
from tests.servers.polling import PATIENCE_SECONDS

N = 1 << 16
SECRET = 77.0


def memory_of(array: Any) -> mmap.mmap:
    """Returns the map that an array read in place lies in, which does not keep the read from ending."""
    while isinstance(array, np.ndarray):
        array = array.base
    assert isinstance(array, mmap.mmap)
    return array


@pytest.fixture
def curious(server_address: str) -> Iterator[gradserve.Client]:
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        yield client


def maps_of_averages(acc: gradserve.ConditionalAccumulator, dtype: str) -> Sequence[mmap.mmap]:
    """Reads averages in place until all regions of an accumulator are mapped, and ends the reads."""
    maps = {}
    for step in range(4):
        acc.apply_grad(np.zeros(N, dtype), local_step=step, worker_id="a")
        memory = memory_of(acc.take_grad(1, copy=False))
        maps[id(memory)] = memory
    acc.info()  # a call, which tells the server that the last read has ended
    return list(maps.values())


def shows(maps: Sequence[mmap.mmap], dtype: str) -> bool:
    return any(SECRET in np.frombuffer(memory, dtype) for memory in maps)


@pytest.mark.parametrize(
    ("way", "dtype", "options", "is_visible"),
    [
        ("shared_memory", "float32", {}, True),
        ("bulk", "float32", {}, False),
        ("shared_memory", "float16", {}, False),
        ("shared_memory", "float32", {"deterministic": True}, False),
        ("shared_memory", "float32", {"refuse_non_finite": True}, False),
    ],
    ids=["in a region", "in a payload", "summed in another dtype", "held", "copied to be checked"],
)
def test_sums_of_a_round_under_way(
    server_address: str,
    curious: gradserve.Client,
    name: str,
    way: Literal["shared_memory", "bulk"],
    dtype: str,
    options: dict[str, Any],
    is_visible: bool,
) -> None:
    acc = curious.conditional_accumulator(dtype, shape=(N,), shared_name=name, **options)
    maps = maps_of_averages(acc, dtype)
    with gradserve.connect(server_address, transport=way, timeout=PATIENCE_SECONDS) as other:
        same = other.conditional_accumulator(dtype, shape=(N,), shared_name=name, **options)
        same.apply_grad(np.full(N, SECRET, dtype), local_step=4, worker_id="b")
        assert shows(maps, dtype) == is_visible
        same.apply_grad(np.full(N, SECRET, dtype), local_step=4, worker_id="b")
        assert same.take_grad(2)[0] == SECRET
    assert shows(maps, dtype), "the average of that round is for all who may read averages"
    acc.delete()


def test_other_accumulators_are_never_visible(server_address: str, curious: gradserve.Client, name: str) -> None:
    acc = curious.conditional_accumulator("float32", shape=(N,), shared_name=name)
    maps = maps_of_averages(acc, "float32")
    acc.delete()
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as other:
        private = other.conditional_accumulator("float32", shape=(N,), shared_name=name)
        for step in range(4):
            private.apply_grad(np.full(N, SECRET, np.float32), local_step=step)
            assert private.take_grad(1, copy=False)[0] == SECRET
        private.delete()
    assert not shows(maps, "float32")
