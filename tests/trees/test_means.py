"""Averages through an aggregator, compared with float64: of accumulators on one server, and sharded over two."""

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
from gradserve_testing import LocalServer
from tests.trees.servers import running_tree_on
from tests.trees.workers import at_once, clients_of

WORKERS = 4
SHAPE = (37, 29)


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "sharded"])
def near(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    with running_tree_on(request.param, WORKERS) as (_, aggregator):
        yield aggregator


@pytest.fixture
def workers(near: LocalServer) -> Iterator[list[gradserve.Client]]:
    with clients_of(near.address, WORKERS) as connected:
        yield connected


def _gradients(dtype: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(SHAPE).astype(dtype) for _ in range(WORKERS)]


def _averaged(
    workers: list[gradserve.Client], name: str, gradients: list[np.ndarray], weights: list[float], **spec: Any
) -> gradserve.Average:
    """Averages gradients by push_pull, with all workers at once; returns what each of them gets, as it is the same."""
    dtype = gradients[0].dtype
    made = [each.gradient_accumulator({"w": gradserve.DenseSpec(dtype, SHAPE)}, name, **spec) for each in workers]

    def push_pull(number: int) -> gradserve.Average:
        return made[number].push_pull(
            {"w": gradients[number]}, WORKERS, 0, weight=weights[number], worker_id=f"w{number}"
        )

    results = at_once(push_pull, range(WORKERS))
    for each in results:
        np.testing.assert_array_equal(each["w"], results[0]["w"])
    return results[0]


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("weights", [[1.0] * WORKERS, [0.25, 3.0, 1e-3, 7.5]], ids=["equal", "weighted"])
@pytest.mark.parametrize(
    ("dtype", "last", "each"),
    # The last rounding is to the dtype of the component, that of each multiplication and addition to the sum's.
    [
        (np.float16, 2**-11, 2**-24),
        (ml_dtypes.bfloat16, 2**-8, 2**-24),
        (np.float32, 2**-24, 2**-24),
        (np.float64, 2**-53, 2**-53),
    ],
)
def test_averages_are_exact(
    workers: list[gradserve.Client],
    name: str,
    dtype: Any,
    last: float,
    each: float,
    weights: list[float],
    reduction: str,
) -> None:
    gradients = _gradients(dtype)
    average = _averaged(workers, name, gradients, weights, reduction_type=reduction)
    terms = np.array([weight * each.astype(np.float64) for weight, each in zip(weights, gradients, strict=True)])
    divisor = sum(weights) if reduction == "MEAN" else 1.0
    expected = terms.sum(axis=0) / divisor
    bound = last * np.abs(expected) + 2 * WORKERS * each * np.abs(terms).sum(axis=0) / divisor
    assert (np.abs(average["w"].astype(np.float64) - expected) <= bound + 2**-25 * (dtype == np.float16)).all()
    assert (average.num_gradients, average.total_weight, average.step) == (WORKERS, reduce(add, weights), 1)
    assert sorted(average.worker_ids) == [f"w{number}" for number in range(WORKERS)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_rounded_once(workers: list[gradserve.Client], name: str, dtype: Any) -> None:
    """The sum in float32 is exact here, so the average is the float64 one, rounded to 16 bits."""
    exact = [np.round(each.astype(np.float64) * 64) / 64 for each in _gradients(np.float32)]
    gradients = [each.astype(dtype) for each in exact]
    average = _averaged(workers, name, gradients, [1.0] * WORKERS)
    expected = np.array(gradients, np.float64).mean(axis=0)
    np.testing.assert_array_equal(average["w"], expected.astype(dtype))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_tree_gives_the_same_bits(workers: list[gradserve.Client], name: str, deterministic: bool) -> None:
    gradients = _gradients(np.float32)
    results = [
        _averaged(workers, f"{name}-{number}", gradients, [1.0, 0.3, 0.7, 1.9], deterministic=deterministic)["w"]
        for number in range(5)
    ]
    assert len({each.tobytes() for each in results}) == 1


def test_the_sum_is_passed_on_once(near: LocalServer, workers: list[gradserve.Client], name: str) -> None:
    counts = near.server.counts
    before = (counts.sums, counts.alone)
    _averaged(workers, name, _gradients(np.float32), [1.0] * WORKERS)
    assert (counts.sums, counts.alone) == (before[0] + 1, before[1])


def test_several_components(workers: list[gradserve.Client], name: str) -> None:
    like = {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float64), "c": np.zeros((), np.float32)}
    made = [each.gradient_accumulator(like, name) for each in workers]

    def push_pull(number: int) -> gradserve.Average:
        return made[number].push_pull({key: np.full_like(each, number) for key, each in like.items()}, WORKERS, 0)

    for result in at_once(push_pull, range(WORKERS)):
        for key, each in like.items():
            np.testing.assert_array_equal(result[key], np.full_like(each, 1.5))


def test_large_gradients_over_every_way(near: LocalServer, name: str) -> None:
    """Over gRPC they are uploaded first."""
    gradients = [np.random.default_rng(number).standard_normal(1 << 20).astype(np.float32) for number in range(WORKERS)]
    expected = np.mean(np.array(gradients, np.float64), axis=0)
    for way in ("grpc", "bulk", "shared_memory"):
        with clients_of(near.address, WORKERS, transport=way) as connected:
            made = [each.gradient_accumulator({"w": gradients[0]}, f"{name}-{way}") for each in connected]
            for result in at_once(lambda acc, g: acc.push_pull({"w": g}, WORKERS, 0), made, gradients):
                np.testing.assert_allclose(result["w"], expected, atol=2e-7)
            assert connected[0].list_tensors() == []


def test_sparse_rows_are_divided_by_the_weights_of_those_that_have_them(
    near: LocalServer, workers: list[gradserve.Client], name: str
) -> None:
    """They are passed on one by one."""
    counts = near.server.counts
    before = (counts.sums, counts.alone)
    made = [
        each.gradient_accumulator({"e": gradserve.SparseSpec("float32", (10, 2)), "b": np.zeros(2, np.float32)}, name)
        for each in workers
    ]
    rows = [[0, 3], [3], [3, 9], [1]]
    weights = [1.0, 2.0, 0.5, 4.0]

    def push_pull(number: int) -> gradserve.Average:
        values = np.array([[number + row, 1.0] for row in rows[number]], np.float32)
        gradient = {"e": gradserve.IndexedSlices(values, np.array(rows[number])), "b": np.full(2, number, np.float32)}
        return made[number].push_pull(gradient, WORKERS, 0, weight=weights[number])

    for result in at_once(push_pull, range(WORKERS)):
        expected: dict[int, list[float]] = {}
        for row in (0, 1, 3, 9):
            having = [number for number in range(WORKERS) if row in rows[number]]
            total = sum(weights[number] for number in having)
            expected[row] = [sum(weights[number] * (number + row) for number in having) / total, 1.0]
        rows_of: Any = result["e"]
        order = np.argsort(rows_of.indices)
        np.testing.assert_array_equal(rows_of.indices[order], sorted(expected))
        np.testing.assert_allclose(rows_of.values[order], [expected[row] for row in sorted(expected)], rtol=1e-6)
        np.testing.assert_allclose(result["b"], np.full(2, (0 + 2 + 1 + 12) / 7.5), rtol=1e-6)
    assert (counts.sums, counts.alone) == (before[0], before[1] + WORKERS)
