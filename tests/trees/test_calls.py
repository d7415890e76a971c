"""Workers use an aggregator as they use a server."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async, growing_limits
from tests.trees.servers import running_tree, running_tree_on
from tests.trees.workers import at_once, clients_of

GRADIENT = {"w": np.arange(3, dtype=np.float32)}


Tree = tuple[list[str], LocalServer]
"""The addresses of the servers upstream, and an aggregator."""


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "sharded"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    with running_tree_on(request.param, 2) as servers:
        yield servers


@pytest.fixture
def top(tree: Tree) -> Iterator[gradserve.Client]:
    with gradserve.connect(tree[0]) as client:
        yield client


@pytest.fixture
def workers(tree: Tree) -> Iterator[list[gradserve.Client]]:
    with clients_of(tree[1].address, 2) as connected:
        yield connected


def _made(clients: list[gradserve.Client], name: str, **spec: object) -> list[gradserve.GradientAccumulator]:
    return [each.gradient_accumulator(GRADIENT, name, **spec) for each in clients]  # type: ignore[arg-type]


def test_apply_and_take(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    made = _made(workers, name)
    applied = at_once(
        lambda acc, weight: acc.apply_grad(GRADIENT, 0, weight=weight, worker_id=f"w{weight}"), made, (1.0, 3.0)
    )
    for each in applied:
        assert (each.outcome, each.num_accumulated, each.duplicate) == (gradserve.ACCEPTED, 2, False)
    (at_top,) = _made([top], name)
    assert sorted(at_top.info().worker_ids) == ["w1.0", "w3.0"]
    average = made[0].take_grad(2)
    np.testing.assert_array_equal(average["w"], GRADIENT["w"])
    assert (average.num_gradients, average.total_weight, average.step) == (2, 4.0, 1)
    assert at_top.info().global_step == 1


def test_what_is_created_here_is_upstream(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    acc = workers[0].gradient_accumulator(GRADIENT, name, keep_averages=3, agreement={"workers": "2"})
    assert name in {each.name for each in top.list_accumulators()}
    assert name in {each.name for each in workers[1].list_accumulators()}
    assert top.gradient_accumulator(GRADIENT, name, keep_averages=3, agreement={"workers": "2"}).info() == acc.info()
    with pytest.raises(gradserve.AlreadyExistsError, match="keep_averages"):
        workers[1].gradient_accumulator(GRADIENT, name, keep_averages=2)
    assert acc.delete()
    assert name not in {each.name for each in top.list_accumulators()}
    with pytest.raises(gradserve.NotFoundError):
        acc.info()


def test_the_step_is_that_of_upstream(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    made = _made(workers, name)
    _made([top], name)[0].set_global_step(7)
    assert made[0].info().global_step == 7
    with pytest.raises(gradserve.StaleGradientError) as raised:
        at_once(lambda acc: acc.push_pull(GRADIENT, 2, 6), made)
    assert raised.value.global_step == 7
    made[1].set_global_step(9)
    results = at_once(lambda acc: acc.push_pull(GRADIENT, 2, 9), made)
    assert [each.step for each in results] == [10, 10]
    stale = at_once(lambda acc: acc.apply_grad(GRADIENT, 9), made)
    assert [each.outcome for each in stale] == [gradserve.STALE] * 2


def test_gradients_of_different_steps_do_not_go_together(tree: Tree, name: str) -> None:
    with clients_of(tree[1].address, 4) as clients:
        made = _made(clients, name)
        made[0].set_global_step(3)
        outcomes = at_once(lambda acc, step: acc.apply_grad(GRADIENT, step).outcome, made, (3, 2, 3, 2))
        assert outcomes == [gradserve.ACCEPTED, gradserve.STALE] * 2
        assert made[0].num_accumulated() == 2


def test_a_gradient_that_does_not_fit_is_an_error_for_its_worker_alone(
    workers: list[gradserve.Client], name: str
) -> None:
    made = [each.conditional_accumulator("float32", shape=(None,), shared_name=name) for each in workers]
    bad = gradserve.connect(workers[0].address)
    with bad, pytest.raises(gradserve.InvalidArgumentError, match="Shape mismatch"):
        bad.conditional_accumulator("float32", shape=(None,), shared_name=name).apply_grad(np.zeros((2, 2), np.float32))
    at_once(lambda acc: acc.apply_grad([1.0, 2.0]), made)
    np.testing.assert_array_equal(made[0].take_grad(2), [1.0, 2.0])


def test_values_that_are_not_finite_are_an_error_for_their_worker_alone(
    workers: list[gradserve.Client], name: str
) -> None:
    made = _made(workers, name, refuse_non_finite=True)
    with pytest.raises(gradserve.InvalidArgumentError, match="expected finite values"):
        made[0].apply_grad({"w": np.array([1, np.nan, 2], np.float32)})
    # Each is finite, and their sum is not: the flat sum takes them, and so does this one.
    most = {"w": np.full(3, np.finfo(np.float32).max, np.float32)}
    at_once(lambda acc: acc.apply_grad(most), made)
    assert np.isinf(made[0].take_grad(2)["w"]).all()


def test_shapes_that_differ_get_the_errors_of_a_server(workers: list[gradserve.Client], name: str) -> None:
    made = [each.conditional_accumulator("float32", shared_name=name) for each in workers]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(made[at].apply_grad, np.zeros(2 + at, np.float32)) for at in range(2)]
    errors = [each.exception() for each in calls]
    assert sorted(error is None for error in errors) == [False, True]
    assert any(isinstance(error, gradserve.InvalidArgumentError) for error in errors)


def test_all_readers_cost_one_download(tree: Tree, top: gradserve.Client, name: str) -> None:
    (at_top,) = _made([top], name)
    at_top.apply_grad(GRADIENT)
    at_top.take_grad(1)
    counts = tree[1].server.counts
    with clients_of(tree[1].address, 4) as clients:
        made = _made(clients, name)
        before = counts.downloads
        for step in (None, 1):
            for each in at_once(lambda acc, step: acc.read_average(step), made, [step] * 4):
                np.testing.assert_array_equal(each["w"], GRADIENT["w"])
        assert counts.downloads == before + 1
        # Those that wait for the next one, too.
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(acc.read_average, 2) for acc in made]
            at_top.apply_grad({"w": 2 * GRADIENT["w"]}, 1)
            at_top.take_grad(1)
            for each in waiting:
                np.testing.assert_array_equal(each.result()["w"], 2 * GRADIENT["w"])
        assert counts.downloads == before + 2
        # Nobody reads an old one.
        at_top.apply_grad({"w": 3 * GRADIENT["w"]}, 2)
        at_top.take_grad(1)
        np.testing.assert_array_equal(made[0].read_average()["w"], 3 * GRADIENT["w"])
        with pytest.raises(gradserve.OutOfRangeError):
            made[1].read_average(2)


def test_averages_of_push_pulls_are_read_without_a_download(
    tree: Tree, workers: list[gradserve.Client], name: str
) -> None:
    made = _made(workers, name)
    at_once(lambda acc: acc.push_pull(GRADIENT, 2, 0), made)
    before = tree[1].server.counts.downloads
    np.testing.assert_array_equal(made[0].read_average(1)["w"], GRADIENT["w"])
    assert tree[1].server.counts.downloads == before


def test_waits_that_end_say_what_the_round_waits_for(
    workers: list[gradserve.Client], top: gradserve.Client, name: str
) -> None:
    made = _made(workers, name)

    def push_pull(acc: gradserve.GradientAccumulator, worker: str, limit: float) -> str:
        with pytest.raises(gradserve.DeadlineExceededError) as raised:
            acc.push_pull(GRADIENT, 3, 0, worker_id=worker, timeout=limit)
        return raised.value.message

    for limit in growing_limits():
        said = f"did not get the 3 gradients required within {limit:g} s: 2 gradients are in (workers: a, b"
        if all(said in message for message in at_once(push_pull, made, ("a", "b"), [limit] * 2)):
            break
    with pytest.raises(gradserve.DeadlineExceededError, match="2 gradients are in"):
        made[0].take_grad(3, timeout=0.1)
    with pytest.raises(gradserve.DeadlineExceededError, match="2 gradients are in"):
        made[0].read_average(1, timeout=0.1)
    # The gradients have stayed in the round, and count once.
    (there,) = _made([top], name)
    eventually(lambda: there.info().num_waiting == 0)
    with ThreadPoolExecutor(2) as threads:
        again = [
            threads.submit(acc.push_pull, {"w": 5 * GRADIENT["w"]}, 3, 0, worker_id=worker)
            for acc, worker in zip(made, "ab", strict=True)
        ]
        eventually(lambda: there.info().num_waiting == 2)
        there.apply_grad(GRADIENT, 0, worker_id="c")
        assert [each.result().outcome for each in again] == [gradserve.Outcome.ALREADY_COUNTED] * 2
    np.testing.assert_array_equal(again[0].result()["w"], GRADIENT["w"])


def test_a_call_that_is_made_again_waits_on(workers: list[gradserve.Client], name: str) -> None:
    made = _made(workers, name)
    with pytest.raises(gradserve.DeadlineExceededError) as raised:
        made[0].push_pull(GRADIENT, 2, 0, worker_id="a", timeout=0.05)
    number = raised.value.request_id
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(made[0].push_pull, GRADIENT, 2, 0, worker_id="a", request_id=number)
        other = made[1].push_pull({"w": 3 * GRADIENT["w"]}, 2, 0)
        np.testing.assert_array_equal(other["w"], 2 * GRADIENT["w"])
        np.testing.assert_array_equal(again.result()["w"], other["w"])
    # And once more, after the end of the round: it waits for nobody.
    last = made[0].push_pull(GRADIENT, 2, 0, worker_id="a", request_id=number, timeout=PATIENCE_SECONDS)
    assert last.duplicate
    np.testing.assert_array_equal(last["w"], other["w"])


def test_private_accumulators_stay_here(workers: list[gradserve.Client], top: gradserve.Client) -> None:
    acc = workers[0].gradient_accumulator(GRADIENT)
    acc.apply_grad(GRADIENT)
    np.testing.assert_array_equal(acc.take_grad(1)["w"], GRADIENT["w"])
    assert acc.name in {each.name for each in workers[0].list_accumulators()}
    assert acc.name not in {each.name for each in top.list_accumulators()}


def test_tensors_and_ops_are_here(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    handle = workers[0].put(GRADIENT["w"])
    assert len(workers[0].list_tensors()) == 1
    assert top.list_tensors() == []
    made = _made(workers, name)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(made[1].apply_grad, GRADIENT)
        made[0].apply_grad({"w": handle})
        other.result()
    np.testing.assert_array_equal(made[0].take_grad(2)["w"], GRADIENT["w"])
    np.testing.assert_array_equal(workers[0].get(handle), GRADIENT["w"])


def test_raw_ops_of_accumulators(workers: list[gradserve.Client], name: str) -> None:
    handles = [
        each.raw_ops.ResourceConditionalAccumulator(dtype="float32", shape=(3,), shared_name=name) for each in workers
    ]

    def apply(client: gradserve.Client, handle: gradserve.AccumulatorHandle) -> None:
        client.raw_ops.ResourceAccumulatorApplyGradient(handle=handle, local_step=0, gradient=GRADIENT["w"])

    at_once(apply, workers, handles)
    taken = workers[0].raw_ops.ResourceAccumulatorTakeGradient(handle=handles[0], num_required=2, dtype="float32")
    np.testing.assert_array_equal(taken, GRADIENT["w"])


async def test_the_async_face(tree: Tree, name: str) -> None:
    async with gradserve.aio.connect(tree[1].address) as client:
        acc = await client.gradient_accumulator(GRADIENT, name)
        results = await asyncio.gather(*[acc.push_pull(GRADIENT, 2, 0, worker_id=each) for each in ("a", "b")])
        assert [each.step for each in results] == [1, 1]
        await asyncio.gather(*[acc.apply_grad(GRADIENT, 1) for _ in range(2)])
        assert (await acc.take_grad(2)).num_gradients == 2
        np.testing.assert_array_equal((await acc.read_average())["w"], GRADIENT["w"])


async def test_a_cancelled_call_holds_up_nobody(tree: Tree, name: str) -> None:
    async with gradserve.aio.connect(tree[1].address) as client:
        acc = await client.gradient_accumulator(GRADIENT, name)
        before = tree[1].server.counts.gradients

        async def has_come() -> bool:
            return tree[1].server.counts.gradients > before

        waiting = asyncio.create_task(acc.push_pull(GRADIENT, 2, 0, worker_id="a"))
        await eventually_async(has_come)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        # As on a server, its gradient stays in the round.
        result = await acc.push_pull(GRADIENT, 2, 0, worker_id="b")
        assert sorted(result.worker_ids) == ["a", "b"]


def test_one_worker_alone_waits_for_the_grace() -> None:
    with running_tree(4, grace=0.2) as (_, near), gradserve.connect(near.address) as client:
        acc = client.gradient_accumulator(GRADIENT, "net")
        begin = time.monotonic()
        assert acc.push_pull(GRADIENT, 1, 0).num_gradients == 1
        assert time.monotonic() - begin >= 0.2
