"""Metrics and evaluations on a server, as users of the client see them."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve_protocol.arrays import BFLOAT16
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.trees.servers import running_tree
from tests.trees.workers import at_once, clients_of

W = np.ones(4, np.float32)
Losses = list[Mapping[str, float]]


def made(client: gradserve.Client, name: str, **how: Any) -> gradserve.Parameters:
    return client.parameters({"w": W}, shared_name=name, **how)


def losses(version: gradserve.Version) -> dict[str, float]:
    return {"loss": float(version["w"].sum())}


def of_rounds(parameters: gradserve.Parameters) -> Losses:
    return [each.metrics for each in parameters.rounds()]


def test_metrics_of_updates_and_their_means(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name, num_required=2, max_staleness=1, staleness="inverse_sqrt")
    parameters.push({"w": W}, 0, weight=3, worker_id="a", metrics={"loss": 0.3, "accuracy": 0.9})
    parameters.push_pull({"w": W}, 0, worker_id="b", metrics={"loss": 0.7})
    parameters.push({"w": W}, 0, weight=4, worker_id="a", metrics={"loss": np.float32(2), "n": np.array(3)})
    parameters.push({"w": W}, 1, worker_id="b", metrics={"loss": math.nan, "n": BFLOAT16.type(5)})
    first, second = parameters.rounds()
    assert list(first.metrics) == ["accuracy", "loss"]
    assert first.metrics == {"loss": pytest.approx(0.4), "accuracy": 0.9}
    weights = [4 / math.sqrt(2), 1]
    assert second.metrics == pytest.approx({"loss": math.nan, "n": np.average([3, 5], weights=weights)}, nan_ok=True)
    assert [each.metrics for each in first.updates] == [{"accuracy": 0.9, "loss": 0.3}, {"loss": 0.7}]


BAD_METRICS: list[tuple[Any, str, str]] = [
    ({"loss": "low"}, "metrics['loss']", "expected a number for metrics"),
    ({"loss": [1.0]}, "metrics['loss']", "expected a number"),
    ({"loss": None}, "metrics['loss']", "expected a number"),
    ({3: 1.0}, "metrics", "expected names as keys"),
    ([("loss", 1.0)], "metrics", "expected a dict by name"),
    ({"": 1.0}, "metrics", "an empty one"),
    ({65 * "x": 1.0}, "metrics", "at most 64 bytes, got 65"),
    ({22 * "ü" + 21 * "x": 1.0}, "metrics", "at most 64 bytes, got 65"),
    ({f"m{number}": 1.0 for number in range(33)}, "metrics", "at most 32 metrics"),
]


@pytest.mark.parametrize(("metrics", "field", "match"), BAD_METRICS)
@pytest.mark.parametrize("method", ["push", "push_pull", "report", "evaluate"])
def test_bad_metrics(client: gradserve.Client, name: str, method: str, metrics: Any, field: str, match: str) -> None:
    parameters = made(client, name)
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: parameters.push({"w": W}, 0, metrics=metrics),
        "push_pull": lambda: parameters.push_pull({"w": W}, 0, metrics=metrics),
        "report": lambda: parameters.report(metrics, 0),
        "evaluate": lambda: parameters.evaluate(lambda _: metrics, until=0),
    }
    if method == "evaluate" and not isinstance(metrics, Mapping):
        field, match = "fn", "expected fn to return metrics by name"
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
        calls[method]()
    assert raised.value.field == field
    assert (parameters.info().step, parameters.evaluations()) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "field", "match"),
    [
        ({"metrics": {}}, "metrics", "at least one metric"),
        ({"step": 1}, "step", "at most 0, the step of the newest version, got 1"),
        ({"step": -1}, "step", "at least 0"),
        ({"step": "now"}, "step", "an integer for step"),
        ({"weight": 0}, "weight", "positive, finite weight"),
        ({"weight": math.inf}, "weight", "positive, finite weight"),
        ({"weight": math.nan}, "weight", "positive, finite weight"),
        ({"weight": "much"}, "weight", "a number for weight"),
        ({"worker_id": 300 * "x"}, "worker_id", "at most 256 bytes"),
        ({"request_id": -1}, "request_id", "an integer"),
    ],
)
def test_bad_reports(client: gradserve.Client, name: str, arguments: Any, field: str, match: str) -> None:
    parameters = made(client, name)
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
        parameters.report(**{"metrics": {"loss": 1}, "step": 0} | arguments)
    assert raised.value.field == field


def test_a_push_that_is_repeated_counts_once_with_its_metrics(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name, num_required=2)
    call = 1 << 40
    for _ in range(3):
        parameters.push({"w": W}, 0, worker_id="a", metrics={"loss": 1}, request_id=call)
    with pytest.raises(gradserve.InvalidArgumentError, match="same content"):
        parameters.push({"w": W}, 0, worker_id="a", metrics={"loss": 2}, request_id=call)
    parameters.push({"w": W}, 0, worker_id="b", metrics={"loss": 4})
    assert parameters.push({"w": W}, 0, worker_id="a", metrics={"loss": 1}, request_id=call).duplicate
    assert of_rounds(parameters) == [{"loss": 2.5}]


def test_reports(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name)
    version = parameters.read()
    assert parameters.report({"loss": 2}, version, weight=3).outcome is gradserve.ACCEPTED
    again = parameters.report({"loss": 9}, 0)
    assert (again.outcome, again.metrics, again.num_reports) == (gradserve.Outcome.ALREADY_COUNTED, {"loss": 2}, 1)
    other = parameters.report({"loss": 6, "n": 1}, 0, worker_id="other", request_id=7)
    assert other == gradserve.ReportResult(gradserve.ACCEPTED, 0, {"loss": 3, "n": 1}, 2, duplicate=False)
    assert parameters.report({"loss": 6, "n": 1}, 0, worker_id="other", request_id=7).duplicate
    parameters.push({"w": W}, 0)
    parameters.report({"loss": 1}, 1, worker_id="e")
    first, second = parameters.evaluations()
    assert (first.step, first.metrics, first.weight, first.num_reports) == (0, {"loss": 3, "n": 1}, 4, 2)
    assert (first.worker_ids[1:], second.worker_ids) == (("other",), ("e",))
    assert [each.evaluation for each in parameters.rounds()] == parameters.evaluations(since=0) == [second]


def test_many_evaluations_come_in_pages(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name)
    for step in range(150):
        parameters.push({"w": W}, step, metrics={"loss": step})
        parameters.report({"loss": step}, step)
    assert [each.metrics["loss"] for each in parameters.evaluations()] == list(range(150))
    assert [each.metrics["loss"] for each in parameters.evaluations(since=100)] == list(range(101, 150))
    records = parameters.rounds()
    assert [each.metrics["loss"] for each in records] == list(range(150))
    assert [each.evaluation.step for each in records if each.evaluation is not None] == list(range(1, 150))


# Evaluators


def is_evaluated(parameters: gradserve.Parameters, step: int) -> bool:
    return step in [each.step for each in parameters.evaluations()]


def push_rounds(parameters: gradserve.Parameters, count: int) -> None:
    for _ in range(count):
        parameters.push({"w": W}, parameters.info().step)


@pytest.mark.parametrize(
    ("every", "until", "steps"),
    [(1, 3, [0, 1, 2, 3]), (2, 4, [0, 2, 4]), (2, 3, [0, 2, 3]), (3, 1, [0, 1]), (5, 0, [0])],
)
def test_an_evaluator_measures_each_nth_version_and_the_last(
    client: gradserve.Client, name: str, every: int, until: int, steps: list[int]
) -> None:
    parameters = made(client, name, keep_versions=20)
    push_rounds(parameters, 5)
    assert parameters.evaluate(losses, every=every, until=until) == len(steps)
    assert {each.step: each.metrics["loss"] for each in parameters.evaluations()} == {at: 4 + 4 * at for at in steps}


def test_an_evaluator_beside_workers_that_is_started_again(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name, keep_versions=3)
    seen: list[int] = []

    def measure(version: gradserve.Version) -> Mapping[str, float]:
        seen.append(version.step)
        return losses(version)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(parameters.evaluate, measure, until=2)
        for step in range(2):
            eventually(partial(is_evaluated, parameters, step))
            push_rounds(parameters, 1)
        assert running.result(PATIENCE_SECONDS) == 3
        again = pool.submit(parameters.evaluate, measure, until=4)
        push_rounds(parameters, 1)
        eventually(partial(is_evaluated, parameters, 3))
        push_rounds(parameters, 1)
        assert again.result(PATIENCE_SECONDS) == 2
    assert seen == [0, 1, 2, 3, 4]
    assert parameters.evaluate(measure, until=4) == 0, "all was stored"
    assert parameters.evaluate(measure, until=4, worker_id="another", weight=3) == 1, (
        "only the newest versions are kept"
    )
    assert parameters.rounds()[-1].evaluation == gradserve.Evaluation(4, {"loss": 20}, 4, ("evaluator", "another"), 2)


def test_an_evaluator_that_is_slower_than_rounds_goes_on_with_the_newest_version(
    client: gradserve.Client, name: str
) -> None:
    parameters = made(client, name, keep_versions=1)

    def measure(version: gradserve.Version) -> Mapping[str, float]:
        push_rounds(parameters, 3)
        return losses(version)

    assert parameters.evaluate(measure, every=2, until=8) == 3
    assert [each.step for each in parameters.evaluations()] == [0, 3, 6]


def test_an_evaluator_can_be_stopped(client: gradserve.Client, name: str) -> None:
    parameters, stop = made(client, name), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(parameters.evaluate, losses, stop=stop.is_set)
        eventually(lambda: parameters.info().num_waiting == 1)
        stop.set()
        assert running.result(PATIENCE_SECONDS) == 1


def test_what_an_evaluator_raises_ends_it(client: gradserve.Client, name: str) -> None:
    parameters = made(client, name)
    with pytest.raises(ZeroDivisionError):
        parameters.evaluate(lambda version: {"loss": 1 / version.step})
    assert parameters.evaluations() == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"every": 0}, "every"),
        ({"until": -1}, "until"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": 3}, "worker_id"),
        ({"stop": True}, "stop"),
        ({"fn": 3}, "fn"),
        ({"fn": lambda _: None}, "fn"),
        ({"fn": lambda _: {}}, "fn"),
        ({"weight": 0}, "weight"),
    ],
)
def test_bad_arguments_of_an_evaluator(
    client: gradserve.Client, name: str, arguments: dict[str, Any], field: str
) -> None:
    parameters = made(client, name)
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        parameters.evaluate(**{"fn": losses, "until": 0, **arguments})
    assert raised.value.field == field


async def test_coroutines_report_and_evaluate(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        parameters = await client.parameters({"w": W}, shared_name=name, keep_versions=9)
        await parameters.push({"w": W}, 0, metrics={"loss": 2})
        assert (await parameters.report({"n": 1}, 0)).num_reports == 1
        assert await parameters.evaluate(losses, until=1) == 2
        assert [each.metrics for each in await parameters.evaluations()] == [{"loss": 4, "n": 1}, {"loss": 8}]
        assert [each.metrics for each in await parameters.rounds()] == [{"loss": 2}]
        waiting = asyncio.ensure_future(parameters.evaluate(losses))
        while not (await parameters.info()).num_waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


# Other servers


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[RestartingServer]:
    with RestartingServer(tmp_path / "state") as running:
        yield running


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_restarts(restarting: RestartingServer, durability: str) -> None:
    """Metrics of the open round are there again: the server has kept them, or the client sends them again."""
    with gradserve.connect(restarting.address) as client:
        parameters = made(client, "llm", num_required=2, durability=durability, keep_versions=9)
        assert parameters.evaluate(losses, until=0) == 1
        for step in range(2):
            parameters.push({"w": W}, step, worker_id="a", metrics={"loss": step})
            restarting.restart()
            parameters.push_pull({"w": W}, step, worker_id="b", weight=3, metrics={"loss": math.inf})
            before = parameters.rounds()
            restarting.restart()
            assert parameters.rounds() == before
        assert parameters.evaluate(losses, until=2) == 2
        restarting.restart()
        assert [each.metrics["loss"] for each in parameters.evaluations()] == [4, 8, 12]
        assert [[each.metrics["loss"] for each in record.updates] for record in parameters.rounds()] == [
            [0, math.inf],
            [1, math.inf],
        ]


def test_metrics_of_sharded_parameters_are_at_their_home() -> None:
    with small_pieces(), running_cluster(2) as servers, gradserve.connect(addresses_of(servers)) as client:
        values = {name: np.ones(64, np.float32) for name in "uvw"}
        parameters = client.parameters(values, shared_name="net", sharded=True, num_required=2, keep_versions=9)
        for worker_id, loss in (("a", 1), ("b", 4)):
            parameters.push(values, 0, worker_id=worker_id, metrics={"loss": loss})
        assert of_rounds(parameters) == [{"loss": 2.5}]
        assert parameters.evaluate(lambda version: {"sum": float(version["u"].sum())}, until=1) == 2
        assert [each.metrics for each in parameters.evaluations()] == [{"sum": 64}, {"sum": 128}]
        assert parameters.rounds()[0].evaluation == parameters.evaluations()[1]


def test_an_aggregator_forwards_metrics_with_the_sums_and_reports() -> None:
    with running_tree(2) as (top, near), clients_of(near.address, 2) as workers:
        made_by = [made(each, "net", num_required=2) for each in workers]
        at_once(
            lambda each, worker, loss: each.push_pull(
                {"w": W}, 0, worker_id=worker, weight=loss, metrics={"loss": loss, worker: 1}
            ),
            made_by,
            "ab",
            (1, 3),
        )
        assert made_by[0].report({"loss": 5}, 1, worker_id="e").outcome is gradserve.ACCEPTED
        assert made_by[1].report({"loss": 7}, 1, worker_id="e").outcome is gradserve.Outcome.ALREADY_COUNTED
        with gradserve.connect(top.address) as client:
            (record,) = made(client, "net").rounds()
            assert record.metrics == {"loss": 2.5, "a": 1, "b": 1}
            assert sorted([each.metrics["loss"] for each in record.updates]) == [1, 3]
            assert record.evaluation == made_by[0].evaluations()[0]
            assert record.evaluation is not None
            assert record.evaluation.metrics == {"loss": 5}
