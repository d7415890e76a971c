"""The buffer pool hands memory out again, never while somebody can still see it."""

import gc
import mmap
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.arrays import buffer_of
from gradserve_protocol.memory.pool import BufferPool

KIB = 1 << 10
MIB = 1 << 20
BIG = (512 * KIB,)
U8 = np.dtype(np.uint8)


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(64 * MIB)


def test_memory_is_handed_out_again(pool: BufferPool) -> None:
    first = pool.empty(BIG, U8)
    where = address(first)
    assert pool.idle_bytes == 0
    del first
    assert pool.idle_bytes == 512 * KIB
    second = pool.empty(BIG, U8)
    assert address(second) == where
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(
    "derive",
    [
        pytest.param(lambda array: array[100:200], id="slice"),
        pytest.param(lambda array: array[100:200][5:][::2], id="slice of slices"),
        pytest.param(lambda array: array.reshape(2, -1), id="reshape"),
        pytest.param(lambda array: array.view(np.float64), id="other dtype"),
        pytest.param(lambda array: array.reshape(2, -1).T, id="transpose"),
        pytest.param(lambda array: array.data, id="memoryview"),
        pytest.param(lambda array: array.data[7:9], id="part of a memoryview"),
        pytest.param(buffer_of, id="buffer_of"),
        pytest.param(lambda array: np.frombuffer(array.data, np.uint8), id="frombuffer"),
        pytest.param(lambda array: np.broadcast_to(array[:1], (3, 1)), id="broadcast"),
    ],
)
def test_memory_in_use_is_not_handed_out(pool: BufferPool, derive: Any) -> None:
    array = pool.empty(BIG, U8)
    where = address(array)
    view = derive(array)
    del array
    assert pool.idle_bytes == 0
    other = pool.empty(BIG, U8)
    assert address(other) != where
    del view
    assert pool.idle_bytes == 512 * KIB
    assert address(pool.empty(BIG, U8)) == where


def test_nearly_equal_sizes_share_memory(pool: BufferPool) -> None:
    array = pool.empty((1_000_000,), U8)
    where = address(array)
    del array
    assert address(pool.empty((1_000_100,), U8)) == where
    # At most an eighth is lost to rounding.
    for num_bytes in (65_536, 65_537, 100_000, 131_071, 1_000_001, 3 * MIB + 1):
        fresh = BufferPool(64 * MIB)
        fresh.empty((num_bytes,), U8)
        assert num_bytes <= fresh.idle_bytes <= num_bytes * 9 / 8 + mmap.PAGESIZE


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(MIB)
    held = [pool.empty(BIG, U8) for _ in range(5)]
    while held:
        held.pop()
        assert pool.idle_bytes <= MIB
    assert pool.idle_bytes == MIB
    held = [pool.empty(BIG, U8) for _ in range(3)]
    assert pool.idle_bytes == 0
    assert len({address(array) for array in held}) == 3


def test_a_pool_of_nothing_keeps_nothing() -> None:
    pool = BufferPool(0)
    array = pool.empty(BIG, U8)
    del array
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128, np.bool_], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7, 5), (300, 301), (2, 3, 70_000)], ids=str)
def test_arrays_are_what_was_asked_for(pool: BufferPool, dtype: Any, shape: tuple[int, ...]) -> None:
    array = pool.empty(shape, np.dtype(dtype))
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    if array.nbytes >= 64 * KIB:
        assert address(array) % mmap.PAGESIZE == 0
    array[...] = 1
    assert (array == 1).all()


def test_small_arrays_are_not_pooled(pool: BufferPool) -> None:
    pool.empty((64 * KIB - 1,), U8)
    assert pool.idle_bytes == 0
    pool.empty((64 * KIB,), U8)
    assert pool.idle_bytes == 64 * KIB


@pytest.mark.parametrize(
    "shape",
    [
        (1 << 60,),
        ((1 << 63) - 1,),
        (1 << 63,),
        (1 << 80,),
        (1 << 62, 2),
        (1 << 32, 1 << 32),  # 2^64 elements: 0 in 64 bits
        (1 << 40, 1 << 40),
        (1 << 60, 8, 3, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64], ids=str)
def test_an_absurd_size_is_a_memory_error(pool: BufferPool, shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(MemoryError):
        pool.empty(shape, np.dtype(dtype))
    assert pool.idle_bytes == 0
    assert pool.empty(BIG, U8).nbytes == 512 * KIB


def test_several_threads() -> None:
    pool = BufferPool(2 * MIB)
    shapes = [(128 * KIB,), (200 * KIB,), (600 * KIB,)]
    failures: list[str] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for turn in range(60):
            array = pool.empty(shapes[(turn + mark) % 3], U8)
            array[::4096] = mark
            other = pool.empty(shapes[turn % 3], U8)
            other[::4096] = mark + 100
            if (array[::4096] != mark).any() or (other[::4096] != mark + 100).any():
                failures.append(f"thread {mark} saw the writes of another in turn {turn}")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert failures == []
    assert 0 <= pool.idle_bytes <= 2 * MIB
