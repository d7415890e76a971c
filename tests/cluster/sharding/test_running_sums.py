"""Gradients in shared memory are added up before the home has decided, as push_pull can stage them again."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.accumulators.contributions import Given
from gradserve.calls.identity import RequestIds
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.sharding.running_sum import RunningSum
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster
from tests.servers.connecting import transport_of
from tests.servers.polling import PATIENCE_SECONDS

SHAPES = {"a": (300, 100), "b": (200, 100), "c": (1, 3)}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(2) as running:
        yield running


def gradient(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def mean(*seeds: int) -> dict[str, Any]:
    gradients = [gradient(seed) for seed in seeds]
    return {name: np.mean([np.float64(each[name]) for each in gradients], axis=0) for name in SHAPES}


def check(average: Any, expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(average[name], values, rtol=1e-5, atol=1e-6)


@pytest.fixture
def workers(servers: list[LocalServer], request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Three workers with an accumulator of the test's own, each over the way that the test asks for."""
    ways: tuple[Any, ...] = getattr(request, "param", ("shared_memory",) * 3)
    clients = [gradserve.connect(addresses_of(servers), transport=way, timeout=PATIENCE_SECONDS) for way in ways]
    shared_name = request.node.name
    yield [each.gradient_accumulator(gradient(0), shared_name, sharded=True) for each in clients]
    for each in clients:
        each.close()


def push_pull(workers: list[Any], seeds: list[int], step: int) -> list[Any]:
    with ThreadPoolExecutor(len(seeds)) as threads:
        calls = [
            threads.submit(workers[seed].push_pull, gradient(seed), len(seeds), step, worker_id=str(seed))
            for seed in seeds
        ]
        return [call.result(PATIENCE_SECONDS) for call in calls]


@pytest.mark.parametrize(
    "workers",
    [("shared_memory",) * 3, ("shared_memory", "grpc", "bulk"), ("shared_memory", "shared_memory", "bulk")],
    indirect=True,
)
def test_all_that_was_added_up_is_in_the_round(workers: list[Any]) -> None:
    """Those that came over the network are held, and added when the home has named them."""
    for step in range(3):
        for average in push_pull(workers, [0, 1, 2], step):
            check(average, mean(0, 1, 2))


def test_a_gradient_that_the_home_never_accepted(workers: list[Any]) -> None:
    """Its worker died between the servers and the home: the others stage theirs again."""
    stage(workers[2], gradient(2))
    for average in push_pull(workers, [0, 1], 0):
        check(average, mean(0, 1))
    for average in push_pull(workers, [0, 1, 2], 1):
        check(average, mean(0, 1, 2))


def test_a_gradient_that_comes_while_others_are_reduced(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the sum when that ends, and so the sum is of no use."""
    end, ended = RunningSum.end, list[RunningSum]()

    async def with_another(running: RunningSum) -> None:
        await end(running)
        ended.append(running)
        values = {each.name: np.ones(each.shape.dims or (), np.float32) for each in running.sum.spec.components}
        await running.sum.commit(await running.sum.stage(Gradient(values), Contribution()))
        await running.sum.finish()
        running.weights["0" * 32] = 1.0

    monkeypatch.setattr(RunningSum, "end", with_another)
    for average in push_pull(workers, [0, 1], 0):
        check(average, mean(0, 1))
    assert ended


def test_rounds_that_share_a_sum_are_reduced_at_the_same_time(
    workers: list[Any], servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither can use it: whoever waits in them stages its gradient again."""
    ends = 0
    both = threading.Event()
    end = RunningSum.end

    async def until_both(running: RunningSum) -> None:
        nonlocal ends
        ends += 1
        if ends == 2 * len(servers):
            both.set()
        await asyncio.to_thread(both.wait, PATIENCE_SECONDS)
        await end(running)

    for worker, values in zip(workers[:2], (gradient(0), gradient(1)), strict=True):
        stage(worker, values, 1)
    monkeypatch.setattr(RunningSum, "end", until_both)
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(each.push_pull, gradient(seed), 1, 1, worker_id=str(seed), request_id=number_of(each))
            for seed, each in enumerate(workers[:2])
        ]
        for seed, call in enumerate(calls):
            check(call.result(PATIENCE_SECONDS), mean(seed))


def test_what_was_added_up_stays_while_another_gradient_of_the_round_is_missing(
    workers: list[Any], servers: list[LocalServer]
) -> None:
    """A gradient that was held is staged again, the others need not be."""
    size = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
    workers[0].apply_grad(gradient(0), 0)
    stage(workers[1], gradient(1))
    workers[1].apply_grad(gradient(1), 0, request_id=number_of(workers[1]))
    name = workers[0].name
    for server in servers:
        server.inspect(lambda running: forget_held(running, name))
    with pytest.raises(gradserve.AbortedError, match="has lost gradients of round 1"):
        workers[2].take_grad(2, timeout=0.1)
    assert workers[2].info().num_bytes == size
    workers[0].apply_grad(gradient(0), 0, request_id=number_of(workers[0]))
    check(workers[2].read_average(1), mean(0, 1))


def forget_held(running: Any, name: str) -> None:
    """Loses what a server holds of an accumulator."""
    for key, accumulator in running.registry.page("default", "", 100):
        if key.name == name:
            accumulator.shard._parts.clear()


def test_a_call_that_is_made_again_counts_once(workers: list[Any]) -> None:
    (average,) = push_pull(workers, [0], 0)
    again = workers[0].push_pull(gradient(0), 1, 0, worker_id="0", request_id=number_of(workers[0]))
    assert again.duplicate
    for each in (average, again):
        check(each, mean(0))


def test_nothing_is_copied(workers: list[Any]) -> None:
    size = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
    stage(workers[0], gradient(0))
    stage(workers[1], gradient(1))
    assert workers[0].info().num_bytes == size, "one sum"


def stage(accumulator: Any, values: dict[str, Any], step: int = 0) -> None:
    """Stages a gradient, and leaves it at that."""
    wire, transport = accumulator._calls._wire, transport_of(accumulator)
    given = Given(wire._call(None), step, wire.components.gradient(values), 1.0, is_kept=True)
    transport.run(wire._stage(given, None))


def number_of(accumulator: Any) -> int:
    """Returns the request id of the latest call."""
    ids: RequestIds = accumulator._calls._wire._ids
    following = ids.new_call()
    return ids.request_id(following._replace(sequence=following.sequence - 1))
