"""How exactly products of matrices are added up, whatever BLAS does."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.host.products import Summation, multiply, sum_of_rows

HALF_ULP = 2.0**-24
SHAPES = [(3, 129, 2), (1, 513, 7), (5, 640, 1), (4, 1025, 6), (2, 4097, 3), (600, 300, 5), (5, 300, 1100)]
"""m, k and n: with one block, several, a shorter last one, several tiles."""


def terms(number: int) -> int:
    """Returns in how many additions a term takes part at most."""
    return 256 + int(np.log2(number / 64))


def factors(shape: tuple[int, int, int], kind: str, dtype: Any = np.float32) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.default_rng(0)
    m, k, n = shape
    if kind == "equal":  # every addition to a sum of some size is rounded to the same side
        return np.full((m, k), 0.1, dtype), np.ones((k, n), dtype)
    left, right = random.standard_normal((m, k)), random.standard_normal((k, n))
    if kind == "of very different sizes":
        left *= 10 ** random.uniform(-6, 6, (m, k))
    return left.astype(dtype), right.astype(dtype)


def chain(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """A product as exact as the worst BLAS makes it: one term after the other."""
    stacked = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    sums = np.zeros((*stacked, left.shape[-2], right.shape[-1]), left.dtype)
    for index in range(left.shape[-1]):
        sums += left[..., :, index, None] * right[..., index, None, :]
    if out is None:
        return sums
    out[...] = sums
    return out


def error(left: NDArray[Any], right: NDArray[Any], summation: Summation) -> float:
    """Returns the largest error, in halves of a unit in the last place of the sum of the magnitudes."""
    out = np.full((left.shape[0], right.shape[1]), np.nan, np.float32)
    multiply(left, right, out, summation)
    wide = left.astype(np.float64), right.astype(np.float64)
    return float(np.max(np.abs(out - wide[0] @ wide[1]) / (np.abs(wide[0]) @ np.abs(wide[1])))) / HALF_ULP


@pytest.mark.parametrize("kind", ["equal", "random", "of very different sizes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], kind: str) -> None:
    left, right = factors(shape, kind)
    assert error(left, right, Summation.BLOCKS) <= terms(shape[1])
    monkeypatch.setattr(np, "matmul", chain)
    assert error(left, right, Summation.BLOCKS) <= terms(shape[1])


def test_the_number_of_terms_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chain it does."""
    monkeypatch.setattr(np, "matmul", chain)
    left, right = factors((1, 100_000, 1), "equal")
    assert error(left, right, Summation.BLOCKS) <= terms(100_000) / 2
    assert error(left, right, Summation.CHAIN) > 5 * terms(100_000)


@pytest.mark.parametrize("kind", ["equal", "random", "of very different sizes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wide_is_rounded_once(shape: tuple[int, int, int], kind: str) -> None:
    left, right = factors(shape, kind)
    assert error(left, right, Summation.WIDE) <= 1.001


@pytest.mark.parametrize("summation", Summation)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 300, 4), (4, 300, 0), (4, 0, 5), (3, 128, 3)], ids=str)
def test_like_numpy(shape: tuple[int, int, int], dtype: Any, summation: Summation) -> None:
    """Of transposed views too, and into one."""
    left, right = factors(shape, "random", dtype)
    expected = left.astype(np.float64) @ right.astype(np.float64)
    # Some BLAS add up all terms one after the other; `test_blocks` and `test_wide_is_rounded_once` say who must not.
    tolerance = {"rtol": 0, "atol": max(shape[1], 1000) * np.finfo(dtype).eps}
    for out in (np.full(expected.shape, np.nan, dtype), np.full(expected.shape[::-1], np.nan, dtype).T):
        multiply(left, right, out, summation)
        np.testing.assert_allclose(out, expected, **tolerance)
    out = np.full(expected.shape, np.nan, dtype)
    multiply(np.asfortranarray(left), np.asfortranarray(right), out, summation)
    np.testing.assert_allclose(out, expected, **tolerance)
    multiply(np.repeat(left, 2, axis=1)[:, ::2].copy(), np.repeat(right, 2, axis=1)[:, ::2], out, summation)
    np.testing.assert_allclose(out, expected, **tolerance)


@pytest.mark.parametrize("summation", Summation)
def test_what_is_not_finite(summation: Summation) -> None:
    left, right = factors((2, 700, 3), "random")
    left[0, 600], left[1, 5] = np.inf, np.nan
    out = np.zeros((2, 3), np.float32)
    with np.errstate(invalid="ignore"):
        multiply(left, right, out, summation)
    np.testing.assert_array_equal(out[0], np.copysign(np.inf, right[600]))
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("kind", ["equal", "random", "of very different sizes"])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000, 10_000])
def test_sum_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int, kind: str) -> None:
    matrix = factors((3, rows, 1), kind)[0].T
    wide = matrix.astype(np.float64)
    bound = 64 * HALF_ULP * np.abs(wide).sum(axis=0)
    assert (np.abs(sum_of_rows(matrix) - wide.sum(axis=0)) <= bound).all()
    monkeypatch.setattr(np, "matmul", lambda left, right: chain(left[None], right)[..., 0, :])
    assert (np.abs(sum_of_rows(matrix) - wide.sum(axis=0)) <= bound).all()
    np.testing.assert_array_equal(sum_of_rows(wide).dtype, np.float64)
