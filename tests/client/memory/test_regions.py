"""Arrays in memory that a server can read in place."""

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradserve_protocol.memory.pool import MIN_BYTES, ClientMemory, RegionPart, RegionPool
from gradserve_protocol.memory.sealed import map_region

F32 = np.dtype(np.float32)
N = MIN_BYTES // 4


def place_of(pool: RegionPool, buffer: memoryview) -> RegionPart | None:
    (part,) = pool.find([buffer])
    return part


@pytest.fixture
def pool() -> RegionPool:
    return RegionPool(1 << 24)


def test_an_array_is_found_by_any_view_of_it(pool: RegionPool) -> None:
    array = pool.empty((4, N), F32)
    found = place_of(pool, array.data.cast("B"))
    assert found is not None
    assert found.offset == 0
    row = place_of(pool, array[2].data.cast("B"))
    assert row is not None
    assert (row.region, row.offset) == (found.region, 2 * N * 4)
    elsewhere = np.frombuffer(array.data.cast("B"), np.uint8)[64:128]
    other = place_of(pool, elsewhere.data)
    assert other is not None
    assert other.offset == 64


def test_others_are_in_no_region(pool: RegionPool) -> None:
    kept = pool.empty((N,), F32)
    assert place_of(pool, np.ones(N, F32).data.cast("B")) is None
    assert place_of(pool, pool.empty((3,), F32).data.cast("B")) is None
    assert kept.size == N


def test_what_lies_outside_one_region_is_in_none(pool: RegionPool) -> None:
    array = pool.empty((N,), F32)
    found = place_of(pool, array.data.cast("B"))
    assert found is not None
    whole = np.frombuffer(found.region.memory, np.uint8)
    assert place_of(pool, whole.data) is not None
    beyond = np.lib.stride_tricks.as_strided(whole, (whole.size + 1,), (1,))
    assert place_of(pool, beyond.data) is None


def test_memory_is_used_again_when_the_last_view_is_gone(pool: RegionPool) -> None:
    array = pool.empty((N,), F32)
    array[:] = 7
    view, first = array[3:], place_of(pool, array.data.cast("B"))
    assert first is not None
    del array
    other = pool.empty((N,), F32)
    assert view[0] == 7
    second = place_of(pool, other.data.cast("B"))
    assert second is not None
    assert second.region is not first.region
    del view
    gc.collect()
    third = place_of(pool, pool.empty((N,), F32).data.cast("B"))
    assert third is not None
    assert third.region is first.region


def test_what_is_taken_back_changes_for_nobody_else(pool: RegionPool) -> None:
    array = pool.empty((N,), F32)
    array[:] = 1
    part = place_of(pool, array.data.cast("B"))
    assert part is not None
    seen = np.frombuffer(map_region(part.region.descriptor, part.region.num_bytes), np.float32)
    array[:5] = 2
    address = array.ctypes.data
    pool.withdraw(part.region)
    assert array[:6].tolist() == [2] * 5 + [1]
    array[:] = 3
    assert array.ctypes.data == address
    assert seen[:6].tolist() == [2] * 5 + [1]
    assert set(seen[6:N]) == {1}
    assert set(array) == {3}


def test_memory_that_was_taken_back_is_not_lent_again(pool: RegionPool) -> None:
    array = pool.empty((N,), F32)
    part = place_of(pool, array.data.cast("B"))
    assert part is not None
    number = part.region.number
    pool.withdraw(part.region)
    pool.withdraw(part.region)
    assert place_of(pool, array.data.cast("B")) is None
    region = weakref.ref(part.region)
    del array, part
    gc.collect()
    assert region() is None
    other = pool.empty((N,), F32)
    found = place_of(pool, other.data.cast("B"))
    assert found is not None
    assert found.region.number != number


def test_without_memory_for_its_own_pages_an_array_stays_as_it_is(
    pool: RegionPool, caplog: pytest.LogCaptureFixture
) -> None:
    array = pool.empty((N,), F32)
    array[:] = 1
    part = place_of(pool, array.data.cast("B"))
    assert part is not None
    pool.withdraw(replace(part.region, descriptor=-1))
    assert "stays shared with the server: cannot make" in caplog.text
    array[:] = 2
    assert set(array) == {2}


def test_more_than_may_be_idle_is_returned_to_the_system() -> None:
    pool = RegionPool(0)
    array = pool.empty((N,), F32)
    found = place_of(pool, array.data.cast("B"))
    assert found is not None
    region, descriptor = weakref.ref(found.region), found.region.descriptor
    del array, found
    gc.collect()
    assert region() is None
    assert not Path(f"/proc/self/fd/{descriptor}").exists() or "gradserve" not in os.readlink(
        f"/proc/self/fd/{descriptor}"
    )


def test_many_regions_of_many_sizes_are_told_apart(pool: RegionPool) -> None:
    arrays = [pool.empty((N + 1000 * index,), F32) for index in range(20)]
    found = [place_of(pool, array.data.cast("B")) for array in arrays]
    assert len({each.region.number for each in found if each is not None}) == len(arrays)


def test_memory_that_is_not_shared_is_ordinary() -> None:
    memory = ClientMemory(shares=False, kept_bytes=0)
    assert memory.regions is None
    assert memory.empty((2, 3), F32).shape == (2, 3)
