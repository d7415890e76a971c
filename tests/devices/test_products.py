"""Products of matrices, cut into parts that several threads take."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import threadpoolctl
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.products import Product, Products, use_one_blas_thread
from tests.servers.polling import PATIENCE_SECONDS

NUM_THREADS = 3
SHAPES = [(1, 1, 1), (3, 5, 7), (0, 4, 5), (4, 0, 5), (4, 5, 0), (200, 300, 100), (100, 300, 200), (1, 1500, 2500)]
"""m, k and n."""


@pytest.fixture
def parallel() -> Iterator[ForkJoin]:
    fork_join = ForkJoin(NUM_THREADS)
    yield fork_join
    fork_join.close()


def matrix(*shape: int) -> NDArray[np.float64]:
    return np.random.RandomState(0).standard_normal(shape)


def product(m: int, k: int, n: int) -> Product:
    return Product(matrix(m, k), matrix(k, n), np.full((m, n), np.nan))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_numpy(parallel: ForkJoin, shape: tuple[int, int, int]) -> None:
    each = product(*shape)
    Products(parallel).compute(each)
    np.testing.assert_allclose(each.out, each.left @ each.right, rtol=1e-12, atol=1e-12)


def test_several_in_any_layout(parallel: ForkJoin) -> None:
    out, left, right = np.full((900, 200), np.nan), matrix(300, 600), matrix(200, 300)
    top, bottom = Product(left.T, right.T, out[:600]), Product(matrix(300, 300), right.T, out[600:])
    Products(parallel).compute(top, bottom)
    np.testing.assert_allclose(out, np.concatenate([left.T @ right.T, matrix(300, 300) @ right.T]), atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((100, 100, 100), [(100, 100)]),
        ((200, 300, 600), [(200, 200)] * 3),
        ((600, 300, 200), [(200, 200)] * 3),
        ((200, 60, 200), [(200, 100), (200, 100)]),
        ((1, 1500, 2500), [(1, 834), (1, 834), (1, 832)]),
        ((0, 5, 7), [(0, 7)]),
        ((0, 5, 0), []),
    ],
)
def test_parts_are_large_and_of_equal_size(shape: tuple[int, int, int], expected: list[tuple[int, int]]) -> None:
    assert [part.out.shape for part in product(*shape).parts(NUM_THREADS)] == expected


def test_all_threads_take_part(parallel: ForkJoin, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(NUM_THREADS, timeout=PATIENCE_SECONDS)
    multiply = np.matmul

    def matmul(left: NDArray[np.float64], right: NDArray[np.float64], out: NDArray[np.float64]) -> None:
        together.wait()
        multiply(left, right, out=out)

    monkeypatch.setattr(np, "matmul", matmul)
    each = product(200, 300, 600)
    Products(parallel).compute(each)
    np.testing.assert_allclose(each.out, each.left @ each.right, atol=1e-10)


def test_what_goes_wrong_in_any_thread_is_raised(parallel: ForkJoin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", lambda left, right, out: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        Products(parallel).compute(product(200, 300, 600))


def test_numbers_that_are_not_finite_warn_of_nothing(parallel: ForkJoin) -> None:
    each = product(200, 300, 600)
    each.left[:] = np.inf
    Products(parallel).compute(each)
    assert not np.isfinite(each.out).any()


def test_one_blas_thread() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):  # which restores what was
        use_one_blas_thread()
        assert {
            library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
        } == {1}
