"""Blocks of memory for averages that clients read in place: how many there may be."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.host.shared_blocks import Readers, SharedAverages, SharedMemory, block_of

SIZE = 1 << 17


class Memory:
    """Memory for the averages of two accumulators, with a reader."""

    def __init__(self, num_blocks: int) -> None:
        self.shared = SharedMemory(num_blocks * SIZE)
        self.readers = Readers()
        self.readers.count = 1
        self.averages: list[SharedAverages | None] = [self.make(), self.make()]

    def make(self) -> SharedAverages:
        return SharedAverages(self.shared, self.readers)

    def arrays(self, number: int, size: int = SIZE) -> Sequence[NDArray[Any]]:
        averages = self.averages[number]
        assert averages is not None
        made = averages.arrays([((size,), np.dtype(np.uint8))])
        assert made is not None
        return made

    @property
    def num_blocks(self) -> float:
        gc.collect()
        return self.shared.used / SIZE


def test_beyond_the_limit_there_are_no_more() -> None:
    memory = Memory(3)
    kept = [memory.arrays(0), memory.arrays(1), memory.arrays(0)]
    assert memory.num_blocks == 3
    with pytest.raises(MemoryError, match="393216 of 393216 bytes are used, no room for 131072"):
        memory.arrays(0)
    assert memory.num_blocks == len(kept)


def test_a_block_counts_while_it_waits_for_the_next_average() -> None:
    memory = Memory(1)
    first = memory.arrays(0)
    del first
    assert memory.num_blocks == 1
    with pytest.raises(MemoryError):
        memory.arrays(1)
    assert memory.arrays(0)
    memory.averages[0] = None
    assert memory.num_blocks == 0
    assert memory.arrays(1)


def test_a_block_counts_while_a_client_may_have_it_mapped() -> None:
    memory = Memory(1)
    part = block_of(memory.arrays(0)[0].data)
    assert part is not None
    block = part.block
    del part
    memory.averages[0] = None
    gc.collect()
    assert block.is_retired
    assert memory.num_blocks == 1
    del block
    assert memory.num_blocks == 0


def test_only_a_few_blocks_wait() -> None:
    memory = Memory(5)
    several = [memory.arrays(0) for _ in range(5)]
    assert memory.num_blocks == 5
    del several
    assert memory.num_blocks == 2


def test_a_block_that_another_thread_retires_is_not_used_again() -> None:
    memory = Memory(8)
    averages = memory.averages[0]
    assert averages is not None
    small = [memory.arrays(0), memory.arrays(0)]
    large = [memory.arrays(0, 2 * SIZE), memory.arrays(0, 2 * SIZE)]
    del large

    class Idle(list[Any]):
        """The idle blocks, two more of which come whenever somebody has looked."""

        def __iter__(self) -> Iterator[Any]:
            seen = [self[index] for index in range(len(self))]
            small.clear()
            return iter(seen)

    averages._idle = Idle(averages._idle)
    assert memory.arrays(0, 2 * SIZE)[0].nbytes == 2 * SIZE


def test_where_nobody_reads_there_are_none() -> None:
    memory = Memory(5)
    memory.readers.count = 0
    assert memory.make().arrays([((SIZE,), np.dtype(np.uint8))]) is None
    memory.readers.count = 1
    assert memory.make().arrays([((SIZE // 2 - 1,), np.dtype(np.uint8))]) is None
    assert memory.num_blocks == 0
