"""Kernels and NumPy, on any number of threads, give the bits of the same operations one by one."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer, cut

SIZES = [(5,), (0,), (), (37, 3), (1,), (1000,), (2, 4, 8)]
"""The shapes of the arrays of a list: some are smaller than a chunk, some larger."""

PAIRS = [
    (np.float32, np.float32),
    (np.float64, np.float64),
    (np.float16, np.float32),
    (ml_dtypes.bfloat16, np.float32),
    (np.float16, np.float16),
    (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    (np.float32, np.float64),
    (np.float16, np.float64),
]
"""Dtypes of gradients and their sums. The last four have no kernels."""

HARD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -1e-7, 65504.0, 1e-41]

Array = NDArray[Any]


def arrays(dtype: Any, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    made = []
    with np.errstate(all="ignore"):
        for shape in SIZES:
            values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)
            array = np.asarray(values).astype(dtype)
            array.reshape(-1)[: len(HARD)] = np.array(HARD).astype(dtype)[: array.size]
            made.append(array)
    return made


def assert_same_bits(found: list[Array], expected: list[Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        wide, expected_wide = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_array_equal(wide, expected_wide)
        np.testing.assert_array_equal(np.signbit(wide), np.signbit(expected_wide))


@pytest.mark.parametrize(("dtype", "sum_dtype"), PAIRS)
@pytest.mark.parametrize("factor", [1.0, 0.3, 3.0, 1e39])
@pytest.mark.filterwarnings("ignore:overflow")
def test_scaled_sums(reducer: Reducer, dtype: Any, sum_dtype: Any, factor: float) -> None:
    first, second = arrays(dtype, 0), arrays(dtype, 1)
    sums = [np.full(each.shape, 7, sum_dtype) for each in first]
    reducer.scale(first, factor, sums)
    with np.errstate(all="ignore"):
        expected = [np.multiply(each, np.dtype(sum_dtype).type(factor), dtype=sum_dtype) for each in first]
    assert_same_bits(sums, expected)
    reducer.add_scaled(sums, second, factor)
    with np.errstate(all="ignore"):
        expected = [
            np.asarray(total + np.multiply(each, np.dtype(sum_dtype).type(factor), dtype=sum_dtype), sum_dtype)
            for total, each in zip(expected, second, strict=True)
        ]
    assert_same_bits(sums, expected)
    assert_same_bits(first + second, arrays(dtype, 0) + arrays(dtype, 1))


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scaling_in_place(reducer: Reducer, factor: float) -> None:
    values = arrays(np.float32, 0)
    reducer.scale(values, factor, values)
    assert_same_bits(values, [each * np.float32(factor) for each in arrays(np.float32, 0)])


@pytest.mark.parametrize(("dtype", "sum_dtype"), PAIRS)
@pytest.mark.parametrize("divisor", [1.0, 3.0, 1e-3])
@pytest.mark.parametrize("in_place", [False, True])
def test_quotients(reducer: Reducer, dtype: Any, sum_dtype: Any, divisor: float, *, in_place: bool) -> None:
    sums = arrays(sum_dtype, 2)
    outs = sums if in_place else [np.full(each.shape, 7, dtype) for each in sums]
    reducer.divide(sums, divisor, outs)
    with np.errstate(all="ignore"):
        quotients = [np.asarray(each / np.dtype(sum_dtype).type(divisor)) for each in arrays(sum_dtype, 2)]
        assert_same_bits(outs, [each.astype(sum_dtype if in_place else dtype) for each in quotients])


@pytest.mark.parametrize(("dtype", "sum_dtype"), PAIRS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_last_sum_and_its_quotient(
    reducer: Reducer, dtype: Any, sum_dtype: Any, factor: float, divisor: float, *, in_place: bool
) -> None:
    sources, sums = arrays(dtype, 1), arrays(sum_dtype, 2)
    outs = sums if in_place else [np.full(each.shape, 7, dtype) for each in sums]
    reducer.add_and_divide(sums, sources, factor, divisor, outs)
    expected, found = arrays(sum_dtype, 2), [np.empty_like(each) for each in outs]
    reducer.add_scaled(expected, sources, factor)
    reducer.divide(expected, divisor, found)
    assert_same_bits(outs, found)


def test_lists_of_several_dtypes(reducer: Reducer) -> None:
    dtypes = [np.float32, np.float16, np.float64, np.float32]
    sources = [np.full(100, index, dtype) for index, dtype in enumerate(dtypes)]
    sums = [np.full(100, 10, np.float64 if dtype == np.float64 else np.float32) for dtype in dtypes]
    reducer.add_scaled(sums, sources, 2.0)
    assert [set(each.tolist()) for each in sums] == [{10}, {12}, {14}, {16}]
    outs = [sums[0], np.zeros(100, np.float16), np.zeros(100), sums[3]]
    reducer.divide(sums, 2.0, outs)
    assert [set(each.tolist()) for each in outs] == [{5}, {6}, {7}, {8}]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sources_that_kernels_cannot_read(reducer: Reducer, dtype: Any) -> None:
    size = 500
    memory = np.zeros(size * np.dtype(dtype).itemsize + 1, np.uint8)
    unaligned = memory[1:].view(dtype)
    unaligned[:] = np.arange(size)
    apart = np.arange(2 * size, dtype=dtype)[::2]
    sums = [np.zeros(size, np.float32), np.zeros(size, np.float32)]
    reducer.add_scaled(sums, [unaligned, apart], 1.0)
    assert [each.tolist() for each in sums] == [list(range(size)), list(range(0, 2 * size, 2))]


def test_nothing(reducer: Reducer) -> None:
    empty = np.empty((0, 3), np.float32)
    reducer.scale([], 2.0, [])
    reducer.add_scaled([empty], [empty.copy()], 2.0)
    reducer.divide([empty], 2.0, [empty])


@pytest.mark.usefixtures("_compiled_kernels")
@pytest.mark.parametrize("num_checks", [0, 3, 9])
def test_sums_are_right_before_all_kernels_are_ready(num_checks: int) -> None:
    parallel = ForkJoin(2)
    reducer = Reducer(parallel, shared_bytes=1)
    checks = iter([False] * num_checks)
    reducer.prepare(lambda: next(checks, True))
    for dtype in (np.float32, np.float64):
        total = np.ones(300, dtype)
        reducer.add_scaled([total], [np.full(300, 2, dtype)], 3.0)
        assert set(total.tolist()) == {7}
    parallel.close()


def test_errors_of_threads_reach_the_caller() -> None:
    parallel = ForkJoin(2)
    reducer = Reducer(parallel, shared_bytes=1)
    with pytest.raises(ValueError, match="could not be broadcast"):
        reducer.add_scaled([np.ones(3, np.float32)], [np.ones(2, np.float32)], 1.0)
    parallel.close()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([3], [[(0, 0, 3)]]),
        ([4], [[(0, 0, 4)]]),
        ([9], [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9)]]),
        ([1, 0, 2, 1, 1], [[(0, 0, 1), (2, 0, 2), (3, 0, 1)], [(4, 0, 1)]]),
        ([3, 6], [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 6)]]),
    ],
)
def test_chunks_of_four(sizes: list[int], expected: list[list[tuple[int, int, int]]]) -> None:
    assert cut(sizes, 4) == expected
