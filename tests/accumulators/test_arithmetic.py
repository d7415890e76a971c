"""Sums, means, weights, types and orders."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient, SparseSlices
from gradserve_server.accumulators.spec import (
    ComponentSpec,
    Layout,
    PartialShape,
    Reduction,
)
from gradserve_server.errors import (
    InvalidArgumentError,
)
from tests.accumulators.bench import F32, Bench, apply, holding, opened, take, value_of


class TestArithmetic:
    async def test_weighted_mean(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, 10, weight=3)
        await apply(acc, 5, 50, weight=1)
        average, _ = await take(acc, 2)
        assert value_of(average) == [2, 20]
        assert average.total_weight == 4

    async def test_tree_of_aggregators_is_exact(self, bench: Bench) -> None:
        leaves = [Bench().accumulator() for _ in range(2)]
        values = [[1.0, 2.0, 6.0], [16.0]]
        root = bench.accumulator()
        for leaf, mine in zip(leaves, values, strict=True):
            for value in mine:
                await apply(leaf, value)
            average, _ = await take(leaf, 1)
            await apply(root, *value_of(average), weight=average.total_weight)
        assert value_of((await take(root, 2))[0]) == [(1 + 2 + 6 + 16) / 4]

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
    async def test_bad_weight(self, bench: Bench, weight: float) -> None:
        with pytest.raises(InvalidArgumentError, match="expected a positive, finite weight"):
            await apply(bench.accumulator(), 1, weight=weight)

    @pytest.mark.parametrize("size", [1, 70_000])
    async def test_weighted_sum_of_any_size(self, bench: Bench, size: int) -> None:
        acc = bench.accumulator(reduction=Reduction.SUM)
        first, second = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
        await acc.apply(None, Contribution(weight=0.5), opened(Gradient({"": first})))
        await acc.apply(None, Contribution(weight=3.0), opened(Gradient({"": second})))
        average, _ = await take(acc, 2)
        np.testing.assert_allclose(average.values[""], first * 0.5 + second * 3.0, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "accumulate", "values", "expected"),
        [
            (np.float16, None, [2048, 1, 1], 2050),
            (np.float16, np.float16, [2048, 1, 1], 2048),
            (np.float16, None, [60000, 60000], np.inf),
            (ml_dtypes.bfloat16, None, [256, 1, 1], 258),
            (ml_dtypes.bfloat16, ml_dtypes.bfloat16, [256, 1, 1], 256),
            (np.float32, None, [2**24, 1, 1], 2**24),
            (np.float32, np.float64, [2**24, 1, 1], 2**24 + 2),
            (np.float64, None, [2**24, 1, 1], 2**24 + 2),
        ],
    )
    async def test_type_of_the_sum(
        self, bench: Bench, dtype: Any, accumulate: Any, values: list[float], expected: float
    ) -> None:
        acc = bench.accumulator(
            ComponentSpec("", np.dtype(dtype)),
            reduction=Reduction.SUM,
            accumulate_dtype=None if accumulate is None else np.dtype(accumulate),
        )
        for value in values:
            array = np.array([value], dtype)
            await acc.apply(None, Contribution(), holding(array))
        taken = (await take(acc, 1))[0].values[""]
        assert taken.dtype == dtype
        assert float(taken[0]) == expected

    @pytest.mark.parametrize("accumulate", [None, np.float32, np.float64, "itself"])
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    async def test_weighted_sum_of_16_bits(self, bench: Bench, dtype: Any, accumulate: Any) -> None:
        sum_dtype = None if accumulate is None else np.dtype(dtype if accumulate == "itself" else accumulate)
        acc = bench.accumulator(ComponentSpec("", np.dtype(dtype)), reduction=Reduction.SUM, accumulate_dtype=sum_dtype)
        for _ in range(2):
            await acc.apply(None, Contribution(weight=2.5), holding(np.array([1, 2], dtype)))
        assert (await take(acc, 1))[0].values[""].tolist() == [5, 10]

    async def test_half_divides_as_tensorflow(self, bench: Bench) -> None:
        half = np.dtype(np.float16)
        acc = bench.accumulator(ComponentSpec("", half), accumulate_dtype=half)
        for value in (2048, 1, 1):
            array = np.array([value], half)
            await acc.apply(None, Contribution(), holding(array))
        assert float((await take(acc, 1))[0].values[""][0]) == 682.5

    async def test_deterministic_sums_do_not_depend_on_arrival(self) -> None:
        rng = np.random.default_rng(0)
        gradients = [(rng.normal(size=1000) * 10.0**e).astype(np.float32) for e in range(-3, 5)]
        results = set()
        for order in ([*range(8)], [*reversed(range(8))], [3, 7, 1, 0, 5, 2, 6, 4]):
            acc = Bench().accumulator(deterministic=True)
            for i in order:
                await acc.apply(
                    None,
                    Contribution(worker_id=f"w{i // 2}", sequence=i, weight=1 + i / 8),
                    holding(gradients[i]),
                )
            results.add((await take(acc, 8))[0].values[""].tobytes())
        assert len(results) == 1

    async def test_deterministic_needs_a_worker(self, bench: Bench) -> None:
        acc = bench.accumulator(deterministic=True)
        with pytest.raises(InvalidArgumentError, match="expected a worker_id"):
            await apply(acc, 1)

    async def test_components_are_atomic(self, bench: Bench) -> None:
        acc = bench.accumulator(
            ComponentSpec("w", F32, PartialShape((2,))), ComponentSpec("e", F32, PartialShape((4, 1)), Layout.SPARSE)
        )
        w = np.ones(2, np.float32)
        good = SparseSlices(np.array([1]), np.ones((1, 1), np.float32))
        bad = SparseSlices(np.array([4]), np.ones((1, 1), np.float32))
        with pytest.raises(InvalidArgumentError, match="index is 4 exceeded 4"):
            await acc.apply(None, Contribution(), opened(Gradient({"w": w, "e": bad})))
        assert (acc.num_accumulated, bench.memory.used) == (0, 0)
        await acc.apply(None, Contribution(), opened(Gradient({"w": w, "e": good})))
        average, _ = await take(acc, 1)
        assert list(average.values) == ["w", "e"]

    async def test_malformed_is_an_error_even_when_stale(self, bench: Bench) -> None:
        acc = bench.accumulator(ComponentSpec("", F32, PartialShape((1,))))
        await acc.set_global_step(5)
        with pytest.raises(InvalidArgumentError, match=r"expected \[1\], got \[2\]"):
            await apply(acc, 1, 2, local_step=0)

    async def test_stale_need_not_fit_the_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await acc.set_global_step(5)
        await apply(acc, 1, local_step=5)
        applied, _ = await apply(acc, 1, 2, local_step=0)
        assert applied.round is None
