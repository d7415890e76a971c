"""The requests that calls of parameters send, and the results that they return."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.digest import digest_of
from tests.client.parameters.fake_server import FakeParameterServer, aio_client_of, values_in

W = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES = {"w": W, "layers": [np.ones(2)]}


def make(client: gradserve.Client, **options: Any) -> gradserve.Parameters:
    return client.parameters(VALUES, shared_name="llm", **options)


def test_a_version_is_a_mapping_and_a_tree(client: gradserve.Client) -> None:
    version = make(client).read()
    assert list(version) == ["w", "layers/0"]
    assert version["w"].tolist() == W.tolist()
    assert version.values["layers"][0].tolist() == [1.0, 1.0]
    assert dict(version).keys() == version.keys()
    assert (version.step, version.digest) == (0, digest_of([W, np.ones(2)]).hex())
    assert repr(version) == (
        "Version(step=0, components={'w': array([[0., 1., 2.], [3., 4., 5.]], dtype=float32), "
        f"'layers/0': array([1., 1.])}}, digest='{version.digest}', num_updates=0, total_weight=0.0, worker_ids=(), "
        "codec=None)"
    )


def test_sgd_of_rate_one_on_deltas_makes_the_weighted_mean_of_the_workers_parameters(client: gradserve.Client) -> None:
    parameters = make(client, num_required=2)
    base = parameters.read()
    local = [base["w"] + 1, base["w"] * 3]
    first = parameters.push({"w": local[0] - base["w"]}, base, weight=1.0, worker_id="a")
    assert first == gradserve.PushResult(gradserve.ACCEPTED, 0, 1.0, 0, duplicate=False, num_updates=1)
    result = parameters.push_pull({"w": local[1] - base["w"]}, base, weight=3.0, worker_id="b")
    assert (result.outcome, result.step, result.weight) == (gradserve.ACCEPTED, 1, 3.0)
    assert result.version["w"].tolist() == ((local[0] + 3 * local[1]) / 4).tolist()
    assert result.version["layers/0"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "update",
    [
        {"w": W},
        {"w": W, "layers/0": None},
        {"w": W, "layers": [None]},
        {"w": W.tolist()},
    ],
)
def test_components_without_an_update_are_left_out(
    server: FakeParameterServer, client: gradserve.Client, update: Any
) -> None:
    make(client).push(update, 0)
    (request,) = server.of("Push")
    assert [part.name for part in request.update] == ["w"]
    assert values_in(request.update)["w"].dtype == np.float32


def test_local_steps_are_numbers_or_versions(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client)
    result = parameters.push_pull({"w": W}, 0)
    parameters.push_pull({"w": W}, result.version)
    parameters.push_pull({"w": W}, parameters.read())
    assert [request.local_step for request in server.of("PushPullParameters")] == [0, 1, 2]


def test_a_stale_update_returns_the_newest_version(client: gradserve.Client) -> None:
    parameters = make(client)
    parameters.push({"w": W}, 0)
    result = parameters.push_pull({"w": W}, 0)
    assert (result.outcome, result.weight, result.staleness) == (gradserve.STALE, 0.0, 1)
    assert (result.step, result.version["w"].tolist()) == (1, (2 * W).tolist())


@pytest.mark.parametrize(
    ("update", "options", "field", "match"),
    [
        ({"v": W}, {}, "update", r"expected components \['layers/0', 'w'\] for the update, got 'v'"),
        ({}, {}, "update", "at least one component"),
        ({"w": None}, {}, "update", "at least one component"),
        (None, {}, "update", "at least one component"),
        ({"w": "text"}, {}, "update", "component 'w'"),
        ({"w": 1e300}, {}, "update", "values of float32 for component 'w'"),
        ({"w": W}, {"local_step": "now"}, "local_step", "an integer for local_step"),
        ({"w": W}, {"local_step": 1}, "local_step", "in the future"),
        ({"w": W}, {"weight": 0}, "weight", "a positive number that fits into a float32 for weight, got 0"),
        ({"w": W}, {"weight": -1.0}, "weight", "positive"),
        ({"w": W}, {"weight": math.inf}, "weight", "positive"),
        ({"w": W}, {"weight": math.nan}, "weight", "positive"),
        ({"w": W}, {"weight": 1e39}, "weight", "fits into a float32"),
        ({"w": W}, {"weight": "much"}, "weight", "a number for weight"),
        ({"w": W}, {"worker_id": 3}, "worker_id", "text for worker_id"),
        ({"w": W}, {"request_id": -1}, "request_id", "an integer"),
    ],
)
@pytest.mark.parametrize("method", ["push", "push_pull"])
def test_bad_updates(
    client: gradserve.Client, method: str, update: Any, options: dict[str, Any], field: str, match: str
) -> None:
    parameters = make(client)
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
        getattr(parameters, method)(update, **{"local_step": 0, **options})
    assert raised.value.field == field


def test_a_failed_push_can_be_sent_again(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, num_required=2)
    server.failures["Push"] = [gradserve.DeadlineExceededError("late")]
    with pytest.raises(gradserve.DeadlineExceededError) as raised:
        parameters.push({"w": W}, 0)
    parameters.push({"w": W}, 0, request_id=raised.value.request_id)
    assert parameters.push({"w": W}, 0, request_id=raised.value.request_id).duplicate
    ids = {(each.request_id.client_id, each.request_id.sequence) for each in server.of("Push")}
    assert len(ids) == 1
    assert parameters.info().num_updates == 1


def test_workers_have_ids_unless_sums_are_deterministic(server: FakeParameterServer, client: gradserve.Client) -> None:
    make(client, num_required=3).push({"w": W}, 0)
    client.parameters(VALUES, shared_name="ordered", deterministic=True).push({"w": W}, 0)
    client.parameters(VALUES, shared_name="ordered", deterministic=True).push({"w": W}, 1, worker_id="a")
    assert [bool(each.worker_id) for each in server.of("Push")] == [True, False, True]


@pytest.mark.parametrize("copy", [True, False])
def test_arrays_in_place_are_read_only(client: gradserve.Client, copy: bool) -> None:
    parameters = make(client)
    assert parameters.read(copy=copy)["w"].flags.writeable == copy
    assert parameters.push_pull({"w": W}, 0, copy=copy).version["w"].flags.writeable == copy
    with pytest.raises(gradserve.InvalidArgumentError, match="copy"):
        parameters.read(copy="no")  # type: ignore[arg-type]


def test_reading_and_waiting(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client)
    for step in range(3):
        parameters.push({"w": W}, step)
    assert parameters.read(2).step == 2
    with pytest.raises(gradserve.OutOfRangeError):
        parameters.read(0)
    parameters.wait(3, timeout=0)
    parameters.wait(1, timeout=math.inf)  # reached, and not kept any more
    waiting = server.of("ReadParameters")[-2:]
    assert [(each.without_values, each.HasField("timeout")) for each in waiting] == [(True, True), (True, False)]
    bad: list[tuple[Any, Any, str]] = [(-1, 1, "step"), ("now", 1, "step"), (1, -1, "timeout"), (1, "soon", "timeout")]
    for step, timeout, field in bad:
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            parameters.wait(step, timeout)
        assert raised.value.field == field


def test_progress_is_told_of_both_directions(client: gradserve.Client) -> None:
    told: list[tuple[int, int]] = []
    make(client).push_pull({"w": W}, 0, progress=lambda moved, total: told.append((moved, total)))
    assert told[-1] == (W.nbytes * 2 + 16, W.nbytes * 2 + 16)


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5])
def test_records_come_in_pages(server: FakeParameterServer, client: gradserve.Client, num_rounds: int) -> None:
    server.num_rounds = num_rounds
    parameters = make(client)
    records = parameters.rounds()
    assert [each.step for each in records] == list(range(1, num_rounds + 1))
    assert [each.step for each in parameters.rounds(since=3)] == list(range(4, num_rounds + 1))
    for each in records:
        assert each.end_time == each.step
        assert each.updates == (gradserve.RoundUpdate("w", 0.0, 2.0, 0, 0.5, None, 0, dropped=False),)
    with pytest.raises(gradserve.InvalidArgumentError, match="since"):
        parameters.rounds(-1)


def test_a_change_keeps_the_other_rules(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client, num_required=4, grace=1.5, deadline=9.0, min_required=2)
    assert parameters.change(num_required=3).rules == gradserve.RoundRules(3, 2, None, 1.5, 60.0, 0.0, 9.0)
    rules = parameters.change(grace="adaptive", deadline=None, min_required=None, expected="alive").rules
    assert rules == gradserve.RoundRules(3, None, "alive", "adaptive", 60.0, 0.0, None)
    assert [each.HasField("optimizer") for each in server.of("ChangeParameters")] == [False, False]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "optimizer"),
        ({"num_required": 0}, "num_required"),
        ({"min_required": 1}, "min_required"),
        ({"grace": "sometimes"}, "grace"),
        ({"deadline": 0}, "deadline"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"schedule": "cosine"}, "schedule"),
    ],
)
def test_bad_changes(
    server: FakeParameterServer, client: gradserve.Client, changes: dict[str, Any], field: str
) -> None:
    parameters = make(client)
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        parameters.change(**changes)
    assert raised.value.field == field
    assert not server.of("ChangeParameters")


def test_a_change_of_the_optimizer_and_no_schedule(server: FakeParameterServer, client: gradserve.Client) -> None:
    make(client).change(optimizer=SGD, schedule=None)
    (request,) = server.of("ChangeParameters")
    assert request.optimizer.sgd.lr == 0.5
    assert request.schedule.HasField("constant")
    assert not request.HasField("rounds")


def test_a_fork_goes_its_own_way(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = make(client)
    parameters.push({"w": W}, 0)
    fork = parameters.fork(0, shared_name="other", idle_lease=5)
    assert isinstance(fork, gradserve.Parameters)
    assert (fork.name, fork.read().step, parameters.read().step) == ("other", 0, 1)
    assert parameters.fork(shared_name="newest").read().step == 1
    assert [each.HasField("step") for each in server.of("ForkParameters")] == [True, False]
    fork.push_pull({"layers": [[1, 1]]}, 0)
    assert parameters.read()["layers/0"].tolist() == [1.0, 1.0]


def test_deleting(client: gradserve.Client) -> None:
    parameters = make(client)
    client.parameters(VALUES, shared_name="b")
    assert [each.name for each in client.list_parameters()] == ["b", "llm"]
    assert client.delete_parameters("b")
    assert not client.delete_parameters("b")
    assert parameters.delete()
    assert not parameters.delete()
    with pytest.raises(gradserve.NotFoundError):
        parameters.read()
    assert client.list_parameters() == []


def test_asyncio(server: FakeParameterServer) -> None:
    async def work() -> None:
        async with aio_client_of(server) as client:
            parameters = await client.parameters(VALUES, shared_name="llm")
            assert isinstance(parameters, gradserve.aio.Parameters)
            assert (await parameters.push({"w": W}, await parameters.read())).step == 1
            assert (await parameters.push_pull({"w": W}, 1)).version["w"].tolist() == (3 * W).tolist()
            fork = await parameters.fork(shared_name="fork")
            assert isinstance(fork, gradserve.aio.Parameters)
            assert [each.name for each in await client.list_parameters()] == ["fork", "llm"]
            assert repr(fork) == "<gradserve.aio.Parameters default/fork: w float32 (2, 3), layers/0 float64 (2,)>"

    asyncio.run(work())


SGD = gradserve.optim.SGD(0.5)
