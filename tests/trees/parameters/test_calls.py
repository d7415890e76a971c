"""Workers use the parameters of the server upstream through an aggregator as they use those of a server."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import optim
from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.placement import home_of
from gradserve_server.app import Server
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async, growing_limits
from tests.trees.servers import end_grace, running_tree_on
from tests.trees.workers import at_once, clients_of

W = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES = {"w": W, "layers": [np.ones(2), np.full(3, 0.5, BFLOAT16)]}
Tree = tuple[list[str], LocalServer]
"""The addresses of the servers upstream, and an aggregator."""


@pytest.fixture(scope="module", params=["server", "cluster", "sharded"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    with running_tree_on(1 if request.param == "server" else 2, 2) as servers, ExitStack() as stack:
        if request.param == "sharded":
            for face in (gradserve.Client, gradserve.aio.Client):
                stack.enter_context(patch.object(face, "parameters", shared_ones_sharded(face.parameters)))
        yield servers


def shared_ones_sharded(parameters: Any) -> Any:
    """Returns `Client.parameters` with sharded=True for all that are created with a shared name."""

    def wanted(client: Any, values: Any = None, shared_name: str | None = None, **how: Any) -> Any:
        if values is not None and shared_name is not None:
            how["sharded"] = True
        return parameters(client, values, shared_name, **how)

    return wanted


@pytest.fixture
def top(tree: Tree) -> Iterator[gradserve.Client]:
    with gradserve.connect(tree[0]) as client:
        yield client


@pytest.fixture
def workers(tree: Tree) -> Iterator[list[gradserve.Client]]:
    with clients_of(tree[1].address, 2) as connected:
        yield connected


def beside(name: str) -> str:
    """Returns another name that belongs to the same server, with one server or two."""
    home = home_of("", name, 2)
    return next(other for number in range(1000) if home_of("", other := f"{name}-{number}", 2) == home)


def made_by(clients: list[gradserve.Client], name: str, values: Any = VALUES, **how: Any) -> list[gradserve.Parameters]:
    return [each.parameters(values, shared_name=name, **how) for each in clients]


def test_push_and_read(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    made = made_by(workers, name, num_required=2)
    pushed = at_once(
        lambda each, worker, weight: each.push({"w": W * weight}, 0, weight=weight, worker_id=worker),
        made,
        ("a", "b"),
        (1.0, 3.0),
    )
    assert [(each.outcome, each.weight, each.staleness) for each in pushed] == [
        (gradserve.ACCEPTED, 1.0, 0),
        (gradserve.ACCEPTED, 3.0, 0),
    ]
    for each in (*made, *made_by([top], name)):
        version = each.read(1, PATIENCE_SECONDS)
        assert version["w"].tolist() == (W + W * 2.5).tolist()
        assert version["layers/1"].tolist() == [0.5] * 3
        assert (version.num_updates, version.total_weight, sorted(version.worker_ids)) == (2, 4.0, ["a", "b"])
        assert each.read().digest == version.digest
        assert each.info().digest in (version.digest, ""), "of sharded ones, the home knows only its rows"
    stale = at_once(lambda each: each.push({"w": W}, 0), made)
    assert [each.outcome for each in stale] == [gradserve.STALE] * 2


def test_what_is_created_here_is_upstream(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    made = workers[0].parameters(VALUES, shared_name=name, keep_versions=3, agreement={"workers": "2"})
    assert name in {each.name for each in top.list_parameters()} & {each.name for each in workers[1].list_parameters()}
    (there,) = made_by([top], name, keep_versions=3, agreement={"workers": "2"})
    assert replace(there.info(), num_shards=0) == made.info(), "workers see no difference"
    assert there.read()["layers/0"].tolist() == [1, 1]
    with pytest.raises(gradserve.AlreadyExistsError, match="keep_versions is 3, not 2"):
        workers[1].parameters(VALUES, shared_name=name, keep_versions=2, agreement={"workers": "2"})
    shapes = {"w": gradserve.DenseSpec("float32", (2, 3))}
    with pytest.raises(gradserve.NotFoundError, match="only shapes"):
        workers[1].parameters(shapes, shared_name=name + "-missing")
    assert made.delete()
    assert name not in {each.name for each in top.list_parameters()}
    with pytest.raises(gradserve.NotFoundError):
        made.info()
    (again,) = made_by([workers[1]], name, {"w": W + 1})
    assert again.read()["w"].tolist() == (W + 1).tolist()


def test_stored_tensors(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    """They may have other dtypes than components, and are here."""
    handle = workers[0].put(np.full(3, 1 + 2**-12, np.float32))
    made = workers[0].parameters({"w": handle}, shared_name=name, refuse_non_finite=True)
    made.push({"w": workers[0].put(np.full(3, 0.25))}, 0)
    assert made.read(1, PATIENCE_SECONDS)["w"].tolist() == [1.25 + 2**-12] * 3
    assert top.list_tensors() == []
    assert workers[0].get(handle).tolist() == [1 + 2**-12] * 3


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_large_parameters_over_every_way(tree: Tree, name: str, way: Any) -> None:
    values = np.linspace(0, 1, 1 << 20)
    with clients_of(tree[1].address, 2, transport=way) as clients:
        made, stored = made_by(clients, f"{name}-{way}", {"w": values}, num_required=2), clients[0].list_tensors()
        results = at_once(lambda each: each.push_pull({"w": np.full(1 << 20, 0.25)}, 0, copy=False), made)
        for each in results:
            assert np.array_equal(each.version["w"], values + 0.25)
        assert clients[0].list_tensors() == stored


def test_all_readers_cost_one_download(tree: Tree, top: gradserve.Client, name: str) -> None:
    (there,) = made_by([top], name)
    counts = tree[1].server.counts
    with clients_of(tree[1].address, 4) as clients:
        made = made_by(clients, name)
        before = counts.downloads
        for step in (None, 0):
            for each in at_once(lambda each, step: each.read(step, PATIENCE_SECONDS), made, [step] * 4):
                assert each["w"].tolist() == W.tolist()
        assert counts.downloads == before + 1
        # Those that wait for the next one, too.
        with ThreadPoolExecutor(8) as threads:
            reading = [threads.submit(each.read, 1, PATIENCE_SECONDS) for each in made]
            waiting = [threads.submit(each.wait, 1, PATIENCE_SECONDS) for each in made]
            there.push({"w": W}, 0)
            for each in reading:
                assert each.result()["w"].tolist() == (2 * W).tolist()
            for done in waiting:
                assert done.result() is None
        assert counts.downloads == before + 2
        # Nobody reads an old one as the newest.
        there.push({"w": W}, 1)
        assert made[0].read()["w"].tolist() == (3 * W).tolist()
        assert made[1].read(1)["w"].tolist() == (2 * W).tolist()
        with pytest.raises(gradserve.OutOfRangeError):
            made[1].read(0)


def test_workers_that_wait_are_one_wait_upstream(tree: Tree, top: gradserve.Client, name: str) -> None:
    (there,) = made_by([top], name)
    before = tree[1].server.counts.downloads
    with clients_of(tree[1].address, 1) as (client,), ThreadPoolExecutor(16) as threads:
        (made,) = made_by([client], name)
        reading = [threads.submit(made.read, 1, PATIENCE_SECONDS) for _ in range(16)]

        def num_readers(server: Server) -> int:
            assert server.aggregator is not None
            known = [each.latest for each in server.aggregator.parameters.known]
            return sum(len(readers) for latest in known for _, readers in latest._reading.values())

        eventually(lambda: tree[1].inspect(num_readers), lambda seen: seen == 16)
        assert tree[1].server.counts.downloads == before + 1
        there.push({"w": W}, 0)
        assert {each.result().digest for each in reading} == {there.read().digest}


def test_versions_of_push_pulls_are_read_without_another_download(
    tree: Tree, workers: list[gradserve.Client], name: str
) -> None:
    counts = tree[1].server.counts
    before = counts.downloads
    made = made_by(workers, name, num_required=2)
    results = at_once(lambda each, worker: each.push_pull({"w": W}, 0, worker_id=worker), made, ("a", "b"))
    assert [each.version["w"].tolist() for each in results] == [(2 * W).tolist()] * 2
    assert made[0].read(1, PATIENCE_SECONDS).digest == results[0].version.digest
    assert counts.downloads <= before + 1


def test_waits_that_end_say_what_the_round_waits_for(
    workers: list[gradserve.Client], top: gradserve.Client, name: str
) -> None:
    made = made_by(workers, name, num_required=3)

    def push_pull(each: gradserve.Parameters, worker: str, limit: float) -> str:
        with pytest.raises(gradserve.DeadlineExceededError) as raised:
            each.push_pull({"w": W}, 0, worker_id=worker, timeout=limit)
        return raised.value.message

    for limit in growing_limits():
        messages = at_once(push_pull, made, ("a", "b"), [limit] * 2)
        if all("2 updates are in (workers: a, b" in each or "(workers: b, a" in each for each in messages):
            break
    with pytest.raises(gradserve.DeadlineExceededError, match="the version of step 1 .* 2 updates are in"):
        made[0].read(1, 0.1)
    with pytest.raises(gradserve.DeadlineExceededError, match="2 updates are in"):
        made[0].wait(1, 0.1)
    (there,) = made_by([top], name)

    def num_refused() -> float:
        return there.info().weights.refused.get("already counted", 0.0)

    before = num_refused()  # more than 0 if the workers had to try again
    with ThreadPoolExecutor(2) as threads:
        # The updates have stayed in the round, and count once.
        again = [
            threads.submit(each.push_pull, {"w": 5 * W}, 0, worker_id=worker)
            for each, worker in zip(made, "ab", strict=True)
        ]
        eventually(num_refused, lambda refused: refused == before + 2)
        there.push({"w": 4 * W}, 0, worker_id="c")
        assert [each.result().outcome for each in again] == [gradserve.Outcome.ALREADY_COUNTED] * 2
    assert made[0].read()["w"].tolist() == (3 * W).tolist()


def test_a_wait_ends_although_the_update_has_not_been_forwarded(workers: list[gradserve.Client], name: str) -> None:
    """The update waits for that of the other worker, and is in memory that its own worker has back after the call."""
    large = np.ones(40_000, np.float32)
    (made,) = made_by(workers[:1], name, {"w": large}, num_required=2)
    with pytest.raises(gradserve.DeadlineExceededError, match="did not get the updates required within 0.1 s"):
        made.push_pull({"w": large}, 0, worker_id="a", timeout=0.1)


def test_the_deadline_of_a_round_ends_waits(workers: list[gradserve.Client], name: str) -> None:
    """Workers that would wait longer hear of it at once, as on a server."""
    made = made_by(workers, name, num_required=3, deadline=0.2)

    def push_pull(each: gradserve.Parameters, worker: str) -> gradserve.GradserveError:
        with pytest.raises(gradserve.DeadlineExceededError, match="its deadline of 0.2 s") as raised:
            each.push_pull({"w": W}, 0, worker_id=worker, timeout=3600)
        return raised.value

    for error in at_once(push_pull, made, ("a", "b")):
        assert error.field == "deadline"
    assert made[0].info().num_updates == 2


def test_bad_updates_are_errors_for_their_worker_alone(tree: Tree, workers: list[gradserve.Client], name: str) -> None:
    made = made_by(workers, name, {"w": W}, num_required=2)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ({"w": W.T}, {}, "update"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, {}, "update"),
        ({"w": W}, {"weight": 1e38}, "weight"),
        ({"w": W}, {"worker_id": "x" * 300}, "worker_id"),
    ]
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(made[1].push, {"w": W}, 0, worker_id="b")
        for update, how, field in bad:
            with pytest.raises(gradserve.InvalidArgumentError) as raised:
                made[0].push(update, 0, **{"worker_id": "a", **how})
            assert (raised.value.field or "").startswith(field), field
        early = threads.submit(made[0].push, {"w": W}, 1, worker_id="a")
        end_grace(tree[1], 2)
        with pytest.raises(gradserve.InvalidArgumentError, match="at most 0, the step of the newest version"):
            early.result()
        made[0].push({"w": W}, 0, worker_id="a")
        assert good.result().outcome is gradserve.ACCEPTED
    assert made[0].read(1, PATIENCE_SECONDS)["w"].tolist() == (2 * W).tolist()


def test_save_load_fork_change_and_rounds(
    workers: list[gradserve.Client], top: gradserve.Client, name: str, tmp_path: Path
) -> None:
    adam = optim.Adam(0.5)
    (made,) = made_by(workers[:1], name, optimizer=adam, keep_versions=3)
    (there,) = made_by([top], name, optimizer=adam, keep_versions=3)
    for step in range(2):
        made.push_pull({"w": W, "layers": [None, np.ones(3, BFLOAT16)]}, step, worker_id="a")
    assert made.rounds() == there.rounds()
    assert [each.updates[0].worker_id for each in made.rounds()] == ["a", "a"]
    assert made.rounds(since=1) == there.rounds()[1:]
    files = tmp_path / "here", tmp_path / "there"
    assert (made.save(files[0]), there.save(files[1])) == (2, 2)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert made.save(files[1], optimizer=False) == 2
    made.push_pull({"w": W}, 2)
    after = made.read()
    assert made.load(files[0]).step == 4
    made.push_pull({"w": W}, 4)
    assert made.read()["w"].tolist() == after["w"].tolist(), "the optimizer has its state again"
    assert made.change(num_required=2, optimizer=optim.Adam(0.25)).rules.num_required == 2
    assert there.info().rules.num_required == 2
    fork = made.fork(shared_name=beside(name))
    assert (fork.read().digest, fork.info().step) == (made.read().digest, 5)
    assert made_by([top], fork.name, optimizer=adam, keep_versions=3)[0].read().digest == fork.read().digest
    resumed = workers[1].parameters(gradserve.load_parameters(files[0]), shared_name=f"{name}-resumed")
    assert (resumed.info().step, resumed.info().optimizer) == (2, adam)


def test_private_parameters_stay_here(workers: list[gradserve.Client], top: gradserve.Client, name: str) -> None:
    made = workers[0].parameters(VALUES)
    assert made.push_pull({"w": W}, 0).version["w"].tolist() == (2 * W).tolist()
    assert made.name in {each.name for each in workers[0].list_parameters()}
    assert made.name not in {each.name for each in top.list_parameters()}
    with pytest.raises(gradserve.InvalidArgumentError, match="an aggregator, where private parameters are") as raised:
        made.fork(shared_name=name)
    assert raised.value.field == "owner_client_id"


async def test_the_async_face(tree: Tree, name: str) -> None:
    async with gradserve.aio.connect(tree[1].address) as client:
        made = await client.parameters(VALUES, shared_name=name, num_required=2)
        results = await asyncio.gather(*[made.push_pull({"w": W}, 0, worker_id=each) for each in ("a", "b")])
        assert [each.step for each in results] == [1, 1]
        await asyncio.gather(*[made.push({"w": W}, 1, worker_id=each) for each in ("a", "b")])
        await made.wait(2, PATIENCE_SECONDS)
        assert (await made.read())["w"].tolist() == (3 * W).tolist()
        assert [each.step for each in await made.rounds()] == [1, 2]


async def test_a_cancelled_call_leaves_its_update_in_the_round(tree: Tree, name: str) -> None:
    async with gradserve.aio.connect(tree[1].address) as client:
        made = await client.parameters(VALUES, shared_name=name, num_required=2)
        before = tree[1].server.counts.gradients

        async def has_come() -> bool:
            return tree[1].server.counts.gradients > before

        waiting = asyncio.create_task(made.push_pull({"w": W}, 0, worker_id="a"))
        await eventually_async(has_come)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        result = await made.push_pull({"w": 3 * W}, 0, worker_id="b")
        assert sorted(result.version.worker_ids) == ["a", "b"]
        assert (await made.info()).weights.accepted == 2.0
