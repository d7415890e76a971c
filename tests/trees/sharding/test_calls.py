"""Calls on accumulators that are sharded upstream, by workers and by clients of the servers themselves."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_testing import LocalServer
from tests.cluster.sharding.clients import MODEL, gradient, same
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.trees.servers import aggregator, running_tree, running_tree_on
from tests.trees.workers import at_once, clients_of

DENSE: dict[str, Any] = {name: each for name, each in MODEL.items() if name != "table"}
WEIGHTS = (0.5, 3.0, 1e-3, 1.7)
Tree = tuple[list[str], LocalServer]


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    with running_tree_on(2, 2) as servers:
        yield servers


def dense(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.standard_normal(each.shape)).astype(each.dtype) for name, each in DENSE.items()}


def averaged(made: list[Any], **how: Any) -> list[Any]:
    """Averages a gradient of each client, one after the other; those of the first two go together."""
    with ThreadPoolExecutor(len(made)) as threads:
        calls = []
        for at, acc in enumerate(made):
            call = threads.submit(acc.push_pull, dense(at), len(made), 0, weight=WEIGHTS[at], worker_id=f"w{at}")
            calls.append(call)
            if 1 <= at < len(made) - 1:
                eventually(lambda: made[0].num_accumulated(), at_least(at + 1))
        return [each.result() for each in calls]


def at_least(count: int) -> Callable[[int], bool]:
    return lambda found: found >= count


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_direct", [0, 2])
def test_the_bits_are_those_of_a_whole_accumulator(tree: Tree, name: str, num_direct: int, deterministic: bool) -> None:
    """With the same tree: workers of an aggregator, and others that are connected to the servers."""
    addresses, near = tree
    found = []
    for sharded in (True, False):
        with clients_of(near.address, 2) as workers, clients_of(addresses, num_direct) as others:
            made = [
                each.gradient_accumulator(DENSE, f"{name}-{sharded}", sharded=sharded, deterministic=deterministic)
                for each in (*workers, *others)
            ]
            results = averaged(made)
            assert {each.info().num_shards for each in made} == {2 * sharded}
        for each in results:
            assert (each.step, each.num_gradients) == (1, 2 + num_direct)
            assert each.total_weight == reduce(add, WEIGHTS[: 2 + num_direct]), "from left to right"
            assert list(each.components) == list(DENSE)
        found.append([{key: value.tobytes() for key, value in each.items()} for each in results])
    assert found[0] == found[1]
    assert all(each == found[0][0] for each in found[0])


def test_a_sum_joins_gradients_that_servers_have_added_up_at_once(tree: Tree, name: str) -> None:
    """Those of other clients, in shared memory; the sum is held, and added to them as it is."""
    addresses, near = tree
    values = np.random.default_rng(7).standard_normal((4, 600, 100)).astype(np.float32)
    with (
        ThreadPoolExecutor(4) as threads,
        clients_of(addresses, 2, transport="shared_memory") as others,
        clients_of(near.address, 2) as workers,
    ):
        made = [each.gradient_accumulator({"w": values[0]}, name) for each in (*others, *workers)]

        def push_pull(at: int) -> Any:
            return made[at].push_pull({"w": values[at]}, 4, 0, weight=WEIGHTS[at])

        calls = [threads.submit(push_pull, at) for at in range(2)]
        eventually(made[0].num_accumulated, at_least(2))
        assert made[0].info().num_bytes == values[0].nbytes, "they are in one sum"
        calls += [threads.submit(push_pull, at) for at in (2, 3)]
        expected = np.average(values.astype(np.float64), axis=0, weights=WEIGHTS)
        for each in calls:
            np.testing.assert_allclose(each.result()["w"], expected, rtol=1e-5, atol=1e-6)
            assert each.result().num_gradients == 4


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_every_call(tree: Tree, name: str, way: str) -> None:
    """With sparse components, whose gradients are passed on one by one."""
    addresses, near = tree
    with clients_of(near.address, 2, transport=way) as workers, gradserve.connect(addresses) as client:
        made = [each.gradient_accumulator(MODEL, name, keep_averages=2) for each in workers]
        direct = client.gradient_accumulator(MODEL, name, keep_averages=2)
        at_once(lambda acc, number: acc.apply_grad(gradient(number), 0), made, (1, 3))
        direct.apply_grad(gradient(5), 0)
        expected = {key: value for key, value in gradient(3).items() if key != "table"}
        averages = [made[0].take_grad(3), made[1].read_average(1), direct.read_average()]
        rows = averages[2]["table"]
        for each in averages:
            for key, value in expected.items():
                same(each[key], value)
            same(each["table"], rows)
            assert (each.step, each.num_gradients) == (1, 3)
        results = at_once(lambda acc, number: acc.push_pull(gradient(number), 2, 1), made, (2, 4))
        for each in results:
            for key, value in expected.items():
                same(each[key], value)
        direct.set_global_step(7)
        assert made[0].info().global_step == 7
        late = made[1].push_pull(gradient(1), 1, 3, on_stale="return")
        assert (late.outcome, late.global_step) == (gradserve.STALE, 7)
        same(late["kernel"], expected["kernel"])
        for step, acc in ((7, made[0]), (8, direct)):
            assert acc.push_pull(gradient(2), 1, step).step == step + 1, "whoever has not heard of the new epoch"


def test_errors_name_the_place_in_the_whole_gradient(tree: Tree, name: str) -> None:
    """Whichever server has it; the others' gradients are not refused with it."""
    with clients_of(tree[1].address, 2) as workers:
        made = [each.gradient_accumulator(DENSE, name, refuse_non_finite=True) for each in workers]
        for key in ("kernel", "bias"):
            bad = {**dense(0), key: np.full_like(dense(0)[key], np.nan)}
            with pytest.raises(gradserve.InvalidArgumentError, match=f"expected finite values for component '{key}'"):
                made[0].apply_grad(bad)
        # Sums that overflow are passed on one by one, as those of a whole accumulator are.
        huge = {**dense(0), "bias": np.full(3, np.finfo(np.float64).max)}
        at_once(lambda acc: acc.apply_grad(huge), made)
        taken = made[0].take_grad(2)
        assert np.isinf(taken["bias"]).all()
        assert taken.num_gradients == 2


def test_calls_without_ids(name: str) -> None:
    """As clients in other languages may make them: the servers hold such gradients under ids of the aggregator."""
    with (
        running_tree_on(2, 1) as (_, near),
        gradserve.connect(near.address) as client,
        RawCalls(near.address) as raw,
    ):
        acc = client.gradient_accumulator({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, name)
        tensor = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], content=np.array([1, 2], np.float32).tobytes()
        )
        parts = [accumulator_pb2.ComponentGradient(name=each, dense=tensor) for each in "ab"]
        for local_step in (0, 1):
            request = messages_pb2.ApplyGradientRequest(
                accumulator=accumulator_pb2.AccumulatorRef(name=name), local_step=local_step, gradient=parts
            )
            assert raw.call("ApplyGradient", request).num_accumulated == local_step + 1
        assert acc.info().num_shards == 2
        average = acc.take_grad(2)
        for each in "ab":
            np.testing.assert_array_equal(average[each], [1, 2])


def test_an_aggregator_of_aggregators(name: str) -> None:
    """The sums of the lower ones are staged as sums, alone or added up."""
    with (
        running_tree_on(2, 4, grace=0.2) as (_, middle),
        aggregator(middle.address, 2) as left,
        aggregator(middle.address, 2) as right,
        clients_of(left.address, 2) as clients,
        clients_of(right.address, 2) as others,
    ):
        made = [each.gradient_accumulator(DENSE, name) for each in (*clients, *others)]
        assert {each.info().num_shards for each in made} == {2}
        for step, count in ((0, 4), (1, 2)):  # in the second round, one sum is late, and the other goes alone
            results = at_once(
                lambda acc, at, step=step, count=count: acc.push_pull(
                    dense(at), count, step, weight=WEIGHTS[at], worker_id=f"w{at}"
                ),
                made[:count],
                range(count),
            )
            for key in DENSE:
                terms = np.array([dense(at)[key].astype(np.float64) for at in range(count)])
                expected = np.average(terms, axis=0, weights=WEIGHTS[:count])
                for each in results:
                    np.testing.assert_allclose(each[key].astype(np.float64), expected, rtol=2**-10, atol=2**-12)
                    assert each.total_weight == sum(WEIGHTS[:count])


def test_parts_are_not_for_aggregators(tree: Tree, name: str) -> None:
    with gradserve.connect(tree[1].address) as client, RawCalls(tree[1].address) as raw:
        client.gradient_accumulator(DENSE, name)
        ref = accumulator_pb2.AccumulatorRef(name=name)
        for method, request in (
            ("StageGradient", messages_pb2.StageGradientRequest(accumulator=ref)),
            ("ReduceGradients", messages_pb2.ReduceGradientsRequest(accumulator=ref)),
        ):
            assert "to which gradients of accumulator" in raw.fail(method, request).message


def test_an_aggregator_with_another_list(tree: Tree, name: str) -> None:
    """It cannot name the home of what is sharded over others."""
    addresses, _ = tree
    with running_tree(2) as (alone, _), gradserve.connect(addresses) as client:
        client.gradient_accumulator(DENSE, name)
        with (
            aggregator(f"{addresses[0]},{alone.address}", 2) as near,
            gradserve.connect(near.address) as worker,
            pytest.raises(gradserve.InvalidArgumentError, match="is in no cluster"),
        ):
            worker.gradient_accumulator(DENSE, name)
