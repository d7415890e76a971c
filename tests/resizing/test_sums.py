"""Sums that aggregators have passed on get other servers as sums, in the dtypes in which they were added up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
from gradserve_ray.states.moving import move_resources
from tests.cluster.sharding.clients import all_sharded
from tests.resizing.folders import cluster, settle, states
from tests.trees.servers import aggregator
from tests.trees.workers import at_once, clients_of

BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = {"kernel": gradserve.DenseSpec(BF16, (7, 3)), "bias": gradserve.DenseSpec(np.float16, (5,))}
WEIGHTS = (0.5, 3.0, 1.25)


@pytest.fixture(autouse=True)
def _sharded() -> Iterator[None]:
    with all_sharded():
        yield


def gradient(seed: int) -> dict[str, Any]:
    values = np.random.default_rng(seed).standard_normal((7, 3))
    return {"kernel": values.astype(BF16), "bias": values.ravel()[:5].astype(np.float16)}


def opened(client: gradserve.Client) -> gradserve.GradientAccumulator:
    return client.gradient_accumulator(MODEL, "net", durability="gradient", one_per_worker=True)


def apply(acc: gradserve.GradientAccumulator, at: int, step: int) -> gradserve.ApplyResult:
    return acc.apply_grad(gradient(at), step, weight=WEIGHTS[at], worker_id=f"w{at}")


def check(average: gradserve.Average, count: int) -> None:
    """Checks that an average is the mean of the first gradients, rounded once from the float32 sum."""
    assert (average.num_gradients, average.total_weight) == (count, sum(WEIGHTS[:count]))
    for name, spec in MODEL.items():
        total = sum(np.float32(WEIGHTS[at]) * gradient(at)[name].astype(np.float32) for at in range(count))
        expected = (total / np.float32(sum(WEIGHTS[:count]))).astype(spec.dtype)
        np.testing.assert_array_equal(average[name], expected)


@pytest.mark.parametrize("after", [3, 1])
def test_a_round_with_a_sum_goes_on(tmp_path: Path, after: int) -> None:
    """With the average of another one, and each of the workers counting once."""
    with (
        cluster(tmp_path, 2) as client,
        aggregator(client.address, 2) as near,
        clients_of(near.address, 2) as workers,
    ):
        made = [opened(each) for each in workers]
        at_once(lambda acc, at: apply(acc, at, 0), made, range(2))
        check(made[0].take_grad(2), 2)
        at_once(lambda acc, at: apply(acc, at, 1), made, range(2))
        assert (near.server.counts.sums, made[0].info().num_shards) == (2, 2)
    move_resources(states(tmp_path, 3), 2, after)
    settle(tmp_path, after, 3)
    with cluster(tmp_path, after) as client:
        acc = opened(client)
        check(acc.read_average(1), 2)
        assert apply(acc, 0, 1).outcome is gradserve.Outcome.ALREADY_COUNTED
        assert apply(acc, 2, 1).num_accumulated == 3
        check(acc.take_grad(3), 3)
