"""set_global_step(drop_gradients=True): the gradients of the round do not count, and those who wait learn so."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient, SparseSlices
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import Event
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.spec import ComponentSpec, Layout, PartialShape
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import Change
from tests.accumulators.bench import F32, Bench, apply, opened, push_pull, take, turns, value_of
from tests.accumulators.durable.disk import Disk, ledger_of
from tests.journals import ListedJournal
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.trees.servers import running_tree_on

LEVELS = [Durability.ROUND, Durability.GRADIENT]


async def test_who_waits_for_the_round_is_late(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=4)
    empty = bench.memory.used
    call = RequestId("a", 1)
    waiting = asyncio.create_task(push_pull(acc, 100, num_required=2, worker_id="a", call=call))
    reader = asyncio.create_task(acc.read_average(None, 5))
    await turns()
    await acc.set_global_step(5, drop_gradients=True)
    applied, average, duplicate = await waiting
    assert (applied.outcome, applied.round, average, duplicate) == (Outcome.STALE, None, None, False)
    state = acc.state
    assert (state.global_step, state.num_accumulated, state.kept_steps) == (5, 0, ())
    assert not reader.done()
    assert bench.memory.used == empty
    applied, average, duplicate = await push_pull(acc, 100, num_required=2, worker_id="a", call=call)
    assert (applied.outcome, average, duplicate) == (Outcome.STALE, None, True)
    for worker_id in ("a", "b"):
        last = asyncio.create_task(push_pull(acc, 3, num_required=2, local_step=5, worker_id=worker_id))
        await turns()
    _, average, _ = await last
    assert (average.step, value_of(average)) == (6, [3])
    assert (await reader) is average


@pytest.mark.parametrize(("step", "drops"), [(0, True), (5, False)], ids=["the same step", "without it"])
async def test_they_stay(bench: Bench, step: int, drops: bool) -> None:
    acc = bench.accumulator()
    waiting = asyncio.create_task(push_pull(acc, 1, num_required=2, worker_id="a"))
    await turns()
    await acc.set_global_step(step, drop_gradients=drops)
    await push_pull(acc, 3, num_required=2, local_step=step, worker_id="b")
    assert value_of((await waiting)[1]) == [2]


async def test_a_take_waits_on(bench: Bench) -> None:
    acc = bench.accumulator()
    await apply(acc, 100)
    waiting = asyncio.create_task(take(acc, 2))
    await turns()
    await acc.set_global_step(7, drop_gradients=True)
    for value in (1, 3):
        await turns()
        assert not waiting.done()
        await apply(acc, value, local_step=7)
    average, _ = await waiting
    assert (average.step, value_of(average)) == (8, [2])


async def test_back_to_an_earlier_step(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=4)
    for step in range(3):
        await push_pull(acc, step + 1, num_required=1, local_step=step)
    waiting = asyncio.create_task(push_pull(acc, 9, num_required=2, local_step=3))
    await turns()
    await acc.set_global_step(2, drop_gradients=True)
    applied, average, _ = await waiting
    assert (applied.outcome, average.step, value_of(average)) == (Outcome.STALE, 2, [2])
    assert acc.state.kept_steps == (1, 2)


async def test_who_asks_again_while_they_are_dropped_waits(bench: Bench) -> None:
    journal: ListedJournal[Event] = ListedJournal()
    acc = Bench(journal=journal).accumulator()
    call = RequestId("a", 1)
    first = asyncio.create_task(push_pull(acc, 1, num_required=2, call=call))
    await turns()
    journal.go_on.clear()
    setting = asyncio.create_task(acc.set_global_step(5, drop_gradients=True))
    again = asyncio.create_task(push_pull(acc, 1, num_required=2, call=call))
    await turns()
    assert not again.done()
    assert acc.outcome_of(call) == ("accepted", 0)
    journal.failure = ResourceExhaustedError("no")
    journal.go_on.set()
    with pytest.raises(ResourceExhaustedError):
        await setting
    journal.failure = None
    await apply(acc, 3)
    assert [value_of((await each)[1]) for each in (first, again)] == [[2], [2]]


async def test_sparse_and_held_gradients(bench: Bench) -> None:
    component = ComponentSpec("", F32, PartialShape((4, 1)), Layout.SPARSE)

    def rows(index: int, value: float) -> OpenGradient:
        slices = SparseSlices(np.array([index]), np.array([[value]], np.float32))
        return opened(Gradient({"": slices}))

    for deterministic in (False, True):
        acc = bench.accumulator(component, key=ResourceKey("test", str(deterministic)), deterministic=deterministic)
        await acc.apply(None, Contribution(worker_id="a"), rows(0, 100))
        await acc.set_global_step(1, drop_gradients=True)
        assert acc.num_bytes == 0
        await acc.apply(None, Contribution(1, worker_id="a"), rows(1, 3))
        average, _ = await take(acc, 1)
        found = average.values[""]
        assert (average.step, found.indices.tolist(), found.values.tolist()) == (2, [1], [[3]])


@pytest.mark.parametrize("shortens", [False, True], ids=["events", "a snapshot"])
@pytest.mark.parametrize("durability", LEVELS)
async def test_after_a_crash(
    tmp_path: Path, durability: Durability, shortens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shortens:
        monkeypatch.setattr(journal_module, "MOST_EVENTS", 1)
    disk = await Disk.open(tmp_path / "state")
    acc = await disk.create(durability=durability, keep_averages=8)
    call = RequestId("a", 1, unanswered=frozenset({1}))
    waiting = asyncio.create_task(push_pull(acc, 1, num_required=2, worker_id="a", call=call))
    await turns()
    await acc.set_global_step(5, drop_gradients=True)
    assert (await waiting)[0].outcome is Outcome.STALE
    await disk.shortened()
    after = await disk.after_crash()
    found = after.found()
    assert ledger_of(found) == ledger_of(acc)
    state = found.state
    assert (state.global_step, state.num_accumulated, state.kept_steps) == (5, 0, ())
    assert found.outcome_of(call) == ("dropped", 0)
    applied, average, duplicate = await push_pull(found, 1, num_required=2, worker_id="a", call=call)
    assert (applied.outcome, average, duplicate) == (Outcome.STALE, None, True)
    for each in (disk, after):
        each.store.close()


@pytest.mark.parametrize("durability", LEVELS)
async def test_a_crash_leaves_the_round_or_the_step(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await Disk.open(tmp_path / "state")
    acc = await disk.create(durability=durability, keep_averages=8)
    waiting = asyncio.create_task(push_pull(acc, 1, num_required=2, worker_id="a"))
    await turns()
    crashed: list[tuple[int, tuple[int, ...]]] = []
    commit = disk.store.commit

    async def commit_and_crash(change: Change) -> None:
        await commit(change)
        after = await disk.after_crash()
        state = after.found().state
        crashed.append((state.global_step, state.kept_steps))
        after.store.close()
        shutil.rmtree(after.path)

    monkeypatch.setattr(disk.store, "commit", commit_and_crash)
    await acc.set_global_step(5, drop_gradients=True)
    assert (await waiting)[0].outcome is Outcome.STALE
    assert crashed == [(5, ())]
    disk.store.close()


@pytest.mark.parametrize("num_servers", [1, 2], ids=["one server", "sharded"])
@pytest.mark.parametrize("through", ["directly", "an aggregator"])
def test_on_every_way(name: str, num_servers: int, through: str) -> None:
    with ExitStack() as stack:
        servers, near = stack.enter_context(running_tree_on(num_servers, workers=1))
        target = near.address if through == "an aggregator" else servers
        chief, worker = (
            stack.enter_context(gradserve.connect(each, timeout=PATIENCE_SECONDS)) for each in (servers, target)
        )
        threads = stack.enter_context(ThreadPoolExecutor(1))
        parameters = {"w": [0.0, 0.0], "b": [0.0]}
        models = [each.gradient_accumulator(parameters, shared_name=name, keep_averages=4) for each in (chief, worker)]

        def push(model: gradserve.GradientAccumulator, value: float, step: int, num_required: int) -> object:
            gradient = {"w": [value, value], "b": [value]}
            return model.push_pull(gradient, num_required, step, on_stale="return")

        waiting = threads.submit(push, models[1], 100.0, 0, 2)
        eventually(models[0].num_accumulated)
        models[0].set_global_step(5, drop_gradients=True)
        late = waiting.result()
        assert isinstance(late, gradserve.PushPullResult)
        assert (late.outcome.name, late.global_step, dict(late)) == ("STALE", 5, {})
        average = push(models[1], 3.0, 5, 1)
        assert isinstance(average, gradserve.PushPullResult)
        assert (average.step, average["w"].tolist(), average["b"].tolist()) == (6, [3.0, 3.0], [3.0])
        assert models[0].info().kept_steps == (6,)
