"""set_global_step(drop_gradients=True): the gradients of the round do not count, and those who wait learn so."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import gradserve
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import AbortedError
from gradserve_server.storage.journal import Durability
from tests.accumulators.bench import Bench, apply, push_pull, take, turns, value_of
from tests.accumulators.durable.disk import Disk
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.trees.servers import running_tree_on


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


@pytest.mark.parametrize("durability", [Durability.ROUND, Durability.GRADIENT])
async def test_after_a_crash(tmp_path: Path, durability: Durability) -> None:
    disk = await Disk.open(tmp_path / "state")
    acc = await disk.create(durability=durability, keep_averages=8)
    call = RequestId("a", 1, unanswered=frozenset({1}))
    waiting = asyncio.create_task(push_pull(acc, 1, num_required=2, worker_id="a", call=call))
    await turns()
    await acc.set_global_step(5, drop_gradients=True)
    assert (await waiting)[0].outcome is Outcome.STALE
    after = await disk.after_crash()
    found = after.found()
    state = found.state
    assert (state.global_step, state.num_accumulated, state.kept_steps) == (5, 0, ())
    with pytest.raises(AbortedError, match="no longer kept"):
        await push_pull(found, 1, num_required=2, worker_id="a", call=call)
    for each in (disk, after):
        each.store.close()


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
