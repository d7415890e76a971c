"""The first value that is not finite: found by NumPy and by kernels, on any number of threads."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.devices.host.reduction import BLOCK, Reducer, first_non_finite
from tests.devices.reduction.conftest import CHUNK_ELEMENTS as CHUNK
from tests.together import together

DTYPES: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def spoil(values: Any, position: int, bad: float) -> None:
    """Makes a value not finite, and most of those after it, which do not matter."""
    flat = values.reshape(-1)
    flat[position] = bad
    flat[position + 1 :: 3] = math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@together("bad", [math.nan, math.inf, -math.inf, -math.nan])
@pytest.mark.parametrize(
    ("shape", "position"),
    [
        ((), 0),
        ((1,), 0),
        ((3, 4), 9),
        ((BLOCK,), BLOCK - 1),
        ((BLOCK + 1,), BLOCK),
        ((3, BLOCK), BLOCK),
        ((2, 3, BLOCK - 1), 3 * (BLOCK - 1) + 7),
        ((CHUNK, CHUNK), 5 * CHUNK - 1),
        ((CHUNK, CHUNK), 5 * CHUNK),
    ],
)
def test_the_first_is_found(
    reducer: Reducer,
    dtype: Any,
    bad: float,
    shape: tuple[int, ...],
    position: int,
) -> None:
    values = np.ones(shape, dtype)
    spoil(values, position, bad)
    assert first_non_finite(values) == position
    assert reducer.first_non_finite([values]) == (0, position)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2 * BLOCK + 3,)])
def test_what_is_finite_has_none(reducer: Reducer, dtype: Any, shape: tuple[int, ...]) -> None:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    for value in (0.0, -0.0, info.max, info.min, info.tiny, info.smallest_subnormal):
        assert first_non_finite(np.full(shape, value, dtype)) is None
        assert reducer.first_non_finite([np.full(shape, value, dtype)]) is None


@pytest.mark.parametrize(
    ("spoilt", "expected"),
    [
        ({}, None),
        ({0: 1}, (0, 1)),
        ({3: 8 * CHUNK + 1, 4: 0, 5: 2}, (3, 8 * CHUNK + 1)),
        ({1: 3 * CHUNK, 6: 0}, (1, 3 * CHUNK)),
        ({5: 1, 6: 5 * CHUNK}, (5, 1)),
        ({6: 5 * CHUNK, 7: 0}, (6, 5 * CHUNK)),
        ({7: CHUNK + 3}, (7, CHUNK + 3)),
    ],
)
def test_of_a_list_the_first_array_counts(
    reducer: Reducer,
    spoilt: dict[int, int],
    expected: tuple[int, int] | None,
) -> None:
    """Whatever their sizes and dtypes are, which decide how each is looked at."""
    specs: list[tuple[int, Any]] = [
        (3, np.float32),
        (9 * CHUNK, np.float32),
        (0, np.float64),
        (9 * CHUNK, np.float16),
        (5, np.float64),
        (3, np.float32),
        (9 * CHUNK, np.float32),
        (9 * CHUNK, np.float64),
    ]
    arrays = [np.ones(size, dtype) for size, dtype in specs]
    for index, position in spoilt.items():
        spoil(arrays[index], position, math.nan)
    assert reducer.first_non_finite(arrays) == expected


def test_arrays_with_gaps_and_without_permission_to_write(reducer: Reducer) -> None:
    values = np.zeros((6, 2 * CHUNK), np.float32)
    values[4, 6] = math.nan
    view = values[::2, ::3]
    view.flags.writeable = False
    assert reducer.first_non_finite([view]) == (0, 2 * view.shape[1] + 2)
    assert reducer.first_non_finite([values.T]) == (0, 6 * 6 + 4)


def test_an_array_that_is_not_aligned(reducer: Reducer) -> None:
    values = np.zeros(4 * CHUNK + 1, np.uint8)[1:].view(np.float32)
    assert not values.flags.aligned
    values[CHUNK - 1] = math.inf
    assert reducer.first_non_finite([values]) == (0, CHUNK - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, CHUNK - 1), (CHUNK, CHUNK)])
def test_copies_tell_whether_they_are_finite(reducer: Reducer, dtype: Any, shape: tuple[int, ...]) -> None:
    values = np.resize(np.arange(-99, 99), shape).astype(dtype)
    other = np.full(3, 0.5, dtype)
    for bad in (None, math.nan, math.inf, -math.inf):
        if bad is not None and values.size:
            values.reshape(-1)[-1] = bad
        copies = [np.empty_like(values), np.empty_like(other)]
        assert reducer.copy([values, other], copies) is bool(np.isfinite(values.astype(np.float64)).all())
        assert np.array_equal(copies[0].astype(np.float64), values.astype(np.float64), equal_nan=True)
        assert np.array_equal(copies[1], other)
