"""After set_global_step to an earlier step, nobody gets an average of the steps that were abandoned."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

import gradserve
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import FileJournal
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import AbortedError, DeadlineExceededError
from gradserve_server.storage.journal import Durability
from tests.accumulators.bench import Bench, apply, push_pull, take, turns, value_of
from tests.accumulators.durable.disk import Disk
from tests.servers.polling import PATIENCE_SECONDS
from tests.trees.servers import running_tree_on


async def rounds(acc: object, steps: range) -> None:
    for step in steps:
        await push_pull(acc, step + 1, num_required=1, local_step=step)  # type: ignore[arg-type]


async def test_readers_and_stragglers(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=4)
    await rounds(acc, range(5))
    await acc.set_global_step(3)
    assert acc.state.kept_steps == (2, 3)
    applied, average, _ = await push_pull(acc, 9, num_required=1, local_step=1)
    assert (applied.outcome, average.step, value_of(average)) == (Outcome.STALE, 3, [3])
    with pytest.raises(DeadlineExceededError):
        await acc.read_average(4, 0)
    assert (await acc.read_average(None, 0)).step == 3
    await rounds(acc, range(3, 5))
    kept = [(await acc.read_average(step, 0)).round_number for step in range(2, 6)]
    assert kept == [1, 2, 5, 6]  # those that were abandoned take no places


async def test_nothing_is_left(bench: Bench) -> None:
    acc = bench.accumulator()
    await rounds(acc, range(5))
    before = bench.memory.used
    await acc.set_global_step(2)
    assert bench.memory.used < before
    _, average, _ = await push_pull(acc, 9, num_required=1, local_step=1)
    assert (average, acc.state.kept_steps) == (None, ())
    waiting = asyncio.create_task(acc.read_average(None, 5))
    await turns()
    await rounds(acc, range(2, 3))
    assert (await waiting).step == 3


@pytest.mark.parametrize("step", [5, 7])
async def test_forward_nothing_is_dropped(bench: Bench, step: int) -> None:
    acc = bench.accumulator(keep_averages=4)
    await rounds(acc, range(5))
    await acc.set_global_step(step)
    assert acc.state.kept_steps == (2, 3, 4, 5)


async def test_waiting_readers(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=4)
    await rounds(acc, range(5))
    readers = [asyncio.create_task(acc.read_average(step, 5)) for step in (6, 7)]
    await turns()
    await acc.set_global_step(2)
    await rounds(acc, range(2, 7))
    assert [(average.step, value_of(average)) for average in await asyncio.gather(*readers)] == [(6, [6]), (7, [7])]


async def test_calls_that_are_sent_again(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=1)
    for step in range(3):
        await push_pull(acc, step + 1, num_required=1, local_step=step, call=RequestId(f"pusher {step}", 1))
    await apply(acc, 4, local_step=3)
    await take(acc, 1, call=RequestId("taker", 1))
    await acc.set_global_step(2)
    _, average, duplicate = await push_pull(acc, 2, num_required=1, local_step=1, call=RequestId("pusher 1", 1))
    assert (duplicate, value_of(average)) == (True, [2])
    with pytest.raises(AbortedError, match="ended with step 3, whose average is no longer kept"):
        await push_pull(acc, 3, num_required=1, local_step=2, call=RequestId("pusher 2", 1))
    with pytest.raises(AbortedError, match="ended with step 4, whose average is no longer kept"):
        await take(acc, 1, call=RequestId("taker", 1))


@pytest.mark.parametrize("durability", [Durability.ROUND, Durability.GRADIENT])
async def test_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability) -> None:
    monkeypatch.setattr(FileJournal, "forget", lambda *_: None)  # the crash comes before what would be written next
    disk = await Disk.open(tmp_path / "state")
    acc = await disk.create(durability=durability, keep_averages=8)
    for step in range(5):
        call = RequestId("a", step, unanswered=frozenset(range(5)))
        await push_pull(acc, step + 1, num_required=1, local_step=step, call=call)
    await acc.set_global_step(3)
    after = await disk.after_crash()
    found = after.found()
    assert (found.state.global_step, found.state.kept_steps) == (3, (1, 2, 3))
    with pytest.raises(AbortedError, match="no longer kept"):
        await push_pull(found, 5, num_required=1, local_step=4, call=RequestId("a", 4))
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
        parameters = {"w": [0.0, 0.0], "b": [0.0]}
        models = [each.gradient_accumulator(parameters, shared_name=name, keep_averages=4) for each in (chief, worker)]
        assert models[0].info().num_shards == (num_servers if num_servers > 1 else 0)

        def push(model: gradserve.GradientAccumulator, step: int, value: float) -> gradserve.PushPullResult:
            gradient = {"w": [value, value], "b": [value]}
            return model.push_pull(gradient, 1, step, on_stale="return")

        for step in range(5):
            push(models[1], step, step + 1.0)
        assert models[1].read_average()["b"].tolist() == [5.0]
        models[0].set_global_step(2)
        late = push(models[1], 1, 0.0)
        assert (late.outcome.name, late.step, late.global_step, late["b"].tolist()) == ("STALE", 2, 2, [2.0])
        assert [model.info().kept_steps for model in models] == [(2,), (2,)]
        for model in models:
            assert model.read_average()["b"].tolist() == [2.0]
            with pytest.raises(gradserve.DeadlineExceededError):
                model.read_average(4, timeout=0.05)
            with pytest.raises(gradserve.OutOfRangeError):
                model.read_average(1)
        assert push(models[1], 2, 7.0)["b"].tolist() == [7.0]
        assert [model.read_average(3)["w"].tolist() for model in models] == [[7.0, 7.0]] * 2
