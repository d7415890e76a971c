"""The recovery of parameters after their server was killed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.optimizers.optimizer import Schedule, ScheduleKind
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.reductions.spec import Mean, Median, Reduction
from gradserve_server.parameters.round_rules import PolynomialDiscount, RoundRules, Staleness
from gradserve_server.parameters.variables import Loaded
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import Change
from tests.parameters.bench import KEY, Values, adam, arrays, opened, push, sgd, shown
from tests.parameters.durable.disk import Disk, ledger_of, shape_of
from tests.servers.polling import eventually_async
from tests.storage.failing_disk import break_flushes, fill_disk

LEVELS = [Durability.ROUND, Durability.GRADIENT]


def call(sequence: int, client: str = "a", **fields: Any) -> RequestId:
    return RequestId(client, sequence, b"content", **fields)


@pytest.fixture(params=LEVELS, ids=lambda level: level.value)
async def disk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Disk]:
    made = await Disk.open(tmp_path / "state", request.param)
    yield made
    made.close()


@pytest.fixture
async def gradient_disk(tmp_path: Path) -> AsyncIterator[Disk]:
    made = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    yield made
    made.close()


async def until_one_waits(disk: Disk, made: Parameters) -> None:
    """Waits until a call waits for a version, and what it has added is on disk."""

    async def num_waiting() -> int:
        return made.num_waiting

    await eventually_async(num_waiting)
    await disk.store.flush()


async def same_after_crash(disk: Disk, made: Parameters) -> Parameters:
    """Returns what the next server finds, which must be all that this one has."""
    after = (await disk.after_crash()).found()
    assert shape_of(after) == shape_of(made)
    assert ledger_of(after) == ledger_of(made)
    return after


async def test_a_version_shows_only_once_it_is_on_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await disk.parameters()
    writes, may_write, commit = asyncio.Event(), asyncio.Event(), disk.store.commit

    async def commit_later(change: Change) -> None:
        writes.set()
        await may_write.wait()
        await commit(change)

    monkeypatch.setattr(disk.store, "commit", commit_later)
    loaded = Changes(loaded=Loaded(arrays({"w": [5, 5]})))
    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: made.push_pull(None, Contribution(), opened({"w": [1, 1]}), None),
        lambda: made.change(None, loaded),
    ]
    for number, step in enumerate(steps):
        writes.clear()
        may_write.clear()
        before = made.state
        changing = asyncio.ensure_future(step())
        await writes.wait()
        assert (made.state.step, made.state.digest) == (number, before.digest)
        may_write.set()
        await changing
        assert (made.state.step, made.state.digest) == (number + 1, made.newest.digest)


# What survives, after each of these


Steps = Callable[[Parameters], Awaitable[object]]
VALUES = {"w": np.array([1, 2], np.float32), "h": np.ones((2, 2), ml_dtypes.bfloat16), "d": np.array(0.5)}


async def nothing(_made: Parameters) -> None: ...


async def rounds(made: Parameters) -> None:
    for step in range(3):
        update: Values = {"w": [step, 1], "h": np.full((2, 2), 2**-9, ml_dtypes.bfloat16), "d": np.array(1.0)}
        await push(made, update, call=call(step), worker_id=f"w{step % 2}", weight=1 + step)


async def absent_components(made: Parameters) -> None:
    await push(made, {"w": [1, 1]})
    await push(made, {"d": np.array(2.0)})
    await push(made, {"d": np.array(2.0), "h": np.ones((2, 2), ml_dtypes.bfloat16)})


async def other_settings(made: Parameters) -> None:
    await rounds(made)
    await made.change(call(7), Changes(adam(lr=0.25), Schedule(warmup=3)))


async def another_optimizer(made: Parameters) -> None:
    await rounds(made)
    await made.change(None, Changes(sgd(momentum=0.5)))


async def another_optimizer_and_rounds(made: Parameters) -> None:
    await another_optimizer(made)
    await rounds(made)


async def another_optimizer_and_back(made: Parameters) -> None:
    await another_optimizer(made)
    await made.change(None, Changes(adam(lr=0.125)))


async def other_rules(made: Parameters) -> None:
    await made.change(call(7), Changes(rounds=RoundRules(2, 1, deadline=60.0, min_interval=0.5)))


async def a_load(made: Parameters) -> None:
    await rounds(made)
    await made.change(call(7), Changes(sgd(), loaded=Loaded(VALUES), step=10))


async def a_load_and_rounds(made: Parameters) -> None:
    await a_load(made)
    await rounds(made)


def arrays_of(version: Version) -> dict[str, Any]:
    return dict(version.values)


async def a_load_with_state(made: Parameters) -> None:
    await rounds(made)
    async with made.reading_state() as (version, state):
        await push(made, {"w": [1, 1]})
        await made.change(None, Changes(loaded=Loaded(arrays_of(version), 0, state)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "steps",
    [
        nothing,
        rounds,
        absent_components,
        other_settings,
        another_optimizer,
        another_optimizer_and_rounds,
        another_optimizer_and_back,
        other_rules,
        a_load,
        a_load_and_rounds,
        a_load_with_state,
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("reduction", [Mean(), Median()], ids=["mean", "median"])
async def test_everything_is_there_and_goes_on_with_the_same_bits(
    disk: Disk, steps: Steps, reduction: Reduction
) -> None:
    schedule = Schedule(ScheduleKind.COSINE, 1, 9, 0.1)
    made = await disk.parameters(
        VALUES, optimizer=adam(lr=0.125), schedule=schedule, reduction=reduction, one_per_worker=False
    )
    await push_all(made, 1)
    await steps(made)
    after = await same_after_crash(disk, made)
    for each in (made, after):
        await each.change(None, Changes(rounds=RoundRules(2)))
        await push_all(each, 4)
    assert shape_of(after)[:2] == shape_of(made)[:2]


async def push_all(made: Parameters, count: int) -> None:
    """Pushes updates of all components: a median needs them."""
    for number in range(count):
        update = {name: (np.ones(each.shape) / (number + 3)).astype(each.dtype) for name, each in VALUES.items()}
        await push(made, update, worker_id=f"w{number}")


async def test_a_cold_optimizer_would_take_another_step(disk: Disk) -> None:
    made = await disk.parameters(optimizer=sgd(momentum=0.5))
    await push(made, {"w": [8, 8]})
    warm = (await disk.after_crash()).found()
    cold = await disk.bench.parameters(key=ResourceKey("test", "cold"), loaded=Loaded(arrays({"w": [8, 8]}), 1))
    for each in (warm, cold):
        await push(each, {"w": [8, 8]})
    assert [shown(each.newest)["w"] for each in (warm, cold)] == [[20, 20], [16, 16]]


# The current round


async def test_at_round_the_current_round_begins_again(tmp_path: Path) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.ROUND)
    made = await disk.parameters(rounds={"num_required": 2})
    await push(made, {"w": [1, 0]}, call=call(1), worker_id="a")
    after = (await disk.after_crash()).found()
    assert (after.state.num_updates, after.state.weights.accepted) == (0, 0)
    for sequence, worker_id in ((1, "a"), (2, "b")):
        again = await after.push(call(sequence), Contribution(worker_id=worker_id), opened({"w": [2, 0]}))
        assert (again[0].outcome, again[1]) == (Outcome.ACCEPTED, False)
    assert shown(after.newest) == {"w": [2, 0]}
    disk.close()


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"deterministic": True},
        {"reduction": Median()},
        {"clip_norm": 2.0},
        {"one_per_worker": False},
    ],
    ids=str,
)
async def test_at_gradient_every_update_counts_once_with_the_same_bits(
    gradient_disk: Disk, spec: dict[str, Any]
) -> None:
    staleness = Staleness(3, PolynomialDiscount(0.5))
    made = await gradient_disk.parameters(
        {"w": np.zeros(1000, np.float32)}, staleness=staleness, rounds={"num_required": 5}, **spec
    )
    numbers = np.random.default_rng(5).normal(size=(5, 1000)).astype(np.float32)

    async def send(to: Parameters, sequence: int) -> tuple[Any, bool]:
        how = Contribution(worker_id=f"w{9 - sequence}", sequence=sequence, weight=1.0 / (sequence + 3))
        return await to.push(call(sequence), how, opened({"w": numbers[sequence]}))

    for sequence in range(4):
        await send(made, sequence)
        after = await same_after_crash(gradient_disk, made)
    for sequence in range(4):
        applied, duplicate = await send(after, sequence)
        assert duplicate, "it is known already"
        assert applied.weight == 1.0 / (sequence + 3)
    for each in (made, after):
        await send(each, 4)
    assert after.newest.digest == made.newest.digest
    assert after.newest.step == 1


async def test_answers_of_calls_stay_the_same(disk: Disk) -> None:
    made = await disk.parameters(staleness=Staleness(1, PolynomialDiscount(0.5)))
    calls = [(call(0), 0, 2.0), (call(1), 1, 1.0), (call(2), 1, 4.0), (call(3), 0, 1.0), (call(4), 3, 1.0)]

    async def answer(to: Parameters, which: RequestId, local_step: int, weight: float) -> tuple[Any, bool]:
        applied, again = await to.push(which, Contribution(local_step, weight), opened({"w": [1, 0]}))
        return {**vars(applied), "round": applied.round and vars(applied.round)}, again

    first = [await answer(made, *each) for each in calls]
    assert [(each["outcome"], each["staleness"]) for each, _ in first] == [
        (Outcome.ACCEPTED, 0),
        (Outcome.ACCEPTED, 0),
        (Outcome.ACCEPTED, 1),
        (Outcome.STALE, 3),
        (Outcome.ACCEPTED, 0),
    ]
    after = await same_after_crash(disk, made)
    assert [await answer(after, *each) for each in calls] == [(each, True) for each, _ in first]


async def test_a_push_pull_that_was_cut_off_is_answered_by_the_next_server(gradient_disk: Disk) -> None:
    made = await gradient_disk.parameters(rounds={"num_required": 2})
    update = opened({"w": [2, 0]})
    waiting = asyncio.create_task(made.push_pull(call(1), Contribution(worker_id="a"), update, None))
    await until_one_waits(gradient_disk, made)
    after = await gradient_disk.after_crash()
    again = asyncio.create_task(after.found().push_pull(call(1), Contribution(worker_id="a"), update, None))
    await push(after.found(), {"w": [4, 0]}, worker_id="b")
    pushed, version, duplicate = await again
    assert (pushed.outcome, shown(version), duplicate) == (Outcome.ACCEPTED, {"w": [3, 0]}, True)
    last = await after.after_crash()
    _, version, duplicate = await last.found().push_pull(call(1), Contribution(worker_id="a"), update, None)
    assert (shown(version), duplicate) == ({"w": [3, 0]}, True)
    waiting.cancel()
    after.close()


# Time


async def test_the_rest_of_a_grace_survives(gradient_disk: Disk) -> None:
    made = await gradient_disk.parameters(rounds={"num_required": 1, "grace": 10.0, "min_interval": 0.0})
    await push(made, {"w": [1, 0]}, worker_id="a")
    gradient_disk.bench.now += 6.0
    await push(made, {"w": [3, 0]}, worker_id="b")
    after = await gradient_disk.after_crash()
    found = after.found()
    after.bench.now += 3.9
    await push(found, {"w": [5, 0]}, worker_id="c")
    assert found.state.step == 0
    after.bench.now += 0.2
    await push(found, {"w": [7, 0]}, worker_id="d")
    assert shown(found.newest) == {"w": [4, 0]}


async def test_the_rest_of_a_deadline_survives(gradient_disk: Disk) -> None:
    made = await gradient_disk.parameters(rounds={"num_required": 3, "deadline": 10.0})
    await push(made, {"w": [1, 0]}, worker_id="a")
    gradient_disk.bench.now += 6.0
    await push(made, {"w": [1, 0]}, worker_id="b")
    after = await gradient_disk.after_crash()
    pull = asyncio.create_task(
        after.found().push_pull(call(1), Contribution(worker_id="b"), opened({"w": [1, 0]}), None)
    )
    await until_one_waits(after, after.found())
    after.bench.now += 3.9
    after.found().go_on()
    assert not pull.done()
    after.bench.now += 0.2
    after.found().go_on()
    with pytest.raises(DeadlineExceededError, match="2 are in"):
        await pull


async def test_the_interval_between_rounds_survives(disk: Disk) -> None:
    made = await disk.parameters(rounds={"num_required": 1, "min_interval": 10.0})
    await push(made, {"w": [1, 0]})
    after = await disk.after_crash()
    found = after.found()
    after.bench.now += 9.9
    await push(found, {"w": [1, 0]})
    assert found.state.step == 1
    after.bench.now += 0.2
    found.go_on()
    await after.journals.settle()
    assert shown(await found.read(2, 10)) == {"w": [2, 0]}


# Creation, deletion, lifetimes


async def test_a_crash_during_the_creation_leaves_nothing(disk: Disk) -> None:
    creating = asyncio.create_task(disk.bench.parameters())
    await asyncio.sleep(0)  # its first version is being written
    assert not creating.done()
    assert disk.store.rows("SELECT * FROM parameters") == []
    await creating
    assert len(disk.store.rows("SELECT * FROM parameters")) == len(disk.store.rows("SELECT * FROM parameters_version"))


async def test_what_was_deleted_stays_deleted(disk: Disk) -> None:
    made = await disk.parameters(rounds={"num_required": 2}, optimizer=adam(lr=1.0))
    for worker_id in "abc":
        await push(made, {"w": [1, 0]}, worker_id=worker_id)
    disk.delete()
    await disk.journals.settle()
    after = await disk.after_crash()
    with pytest.raises(NotFoundError):
        after.found()
    assert after.store.blobs == []
    with pytest.raises(AbortedError):
        await push(made, {"w": [1, 0]})
    await disk.store.flush()
    assert disk.store.segments.num_free == disk.store.segments.num_bytes > 0


async def test_the_space_of_a_version_that_never_comes_is_given_back(disk: Disk) -> None:
    made = await disk.parameters(optimizer=adam(lr=1.0))
    ending = asyncio.create_task(push(made, {"w": [1, 0]}))
    for _ in range(3):
        await asyncio.sleep(0)  # the space is being set aside
    disk.delete()
    await asyncio.wait([ending])
    for _ in range(3):
        await disk.journals.settle()
    assert disk.store.segments.num_free == disk.store.segments.num_bytes > 0
    assert disk.bench.memory.used == disk.bench.bookkeeping.used == 0


async def test_private_ones_keep_their_lifetime(disk: Disk) -> None:
    lifetime = Lifetime(owner="somebody", idle_lease=5.0)
    await disk.parameters(lifetime=lifetime)
    after = await disk.after_crash()
    assert after.bench.registry.lifetime(KEY) == lifetime
    after.bench.now += 6.0
    after.bench.lifetimes.expire(Turn(100))
    with pytest.raises(NotFoundError):
        after.found()


async def test_forks_and_their_origin_are_apart(disk: Disk) -> None:
    made = await disk.parameters(optimizer=sgd(momentum=0.5))
    await push(made, {"w": [8, 8]})
    fork = await disk.bench.registry.fork(KEY, "", None, ResourceKey("test", "fork"), Lifetime())
    await push(made, {"w": [0, 0]})
    disk.delete()
    await disk.journals.settle()
    after = await disk.after_crash()
    found = after.found(ResourceKey("test", "fork"))
    assert shape_of(found) == shape_of(fork)
    await push(found, {"w": [8, 8]})
    assert shown(found.newest) == {"w": [20, 20]}


async def test_nothing_is_written_for_none(disk: Disk) -> None:
    made = await disk.parameters(durability=Durability.NONE)
    await push(made, {"w": [1, 1]})
    assert disk.store.rows("SELECT * FROM parameters") == []


async def test_versions_states_and_records_that_are_not_kept_take_up_no_space(disk: Disk) -> None:
    made = await disk.parameters(keep_versions=2, keep_rounds=3, optimizer=adam(lr=1.0))
    for step in range(10):
        await push(made, {"w": [step, 1]}, call=call(step))
    await disk.store.flush()
    counts = {
        table: len(disk.store.rows(f"SELECT * FROM parameters_{table}"))
        for table in ("version", "state", "round", "update")
    }
    assert counts == {"version": 2, "state": 1, "round": 3, "update": 0}
    assert len(disk.store.blobs) == 3
    await same_after_crash(disk, made)


async def test_limits_that_are_less_than_what_there_is(disk: Disk) -> None:
    await disk.parameters(optimizer=adam(lr=1.0))
    await disk.parameters({"w": np.zeros((), np.float64)}, key=ResourceKey("test", "other"))
    for limits in ({"limit": 31}, {"max_accumulators": 1}):
        with pytest.raises(ResourceExhaustedError):
            await disk.after_crash(**limits)
    await disk.after_crash(limit=32, max_accumulators=2)


# Snapshots


async def test_many_events_become_one_ledger(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 10)
    made = await disk.parameters(
        rounds={"num_required": 1, "grace": "adaptive", "max_grace": 1.0, "expected": 1}, keep_rounds=100
    )
    for step in range(25):
        disk.bench.now += 1.0
        await push(made, {"w": [step, 1]}, call=call(step), worker_id=f"w{step % 3}", weight=step + 1)
        if step == 20:
            await made.change(call(100), Changes(adam(lr=0.5), rounds=RoundRules(1, min_interval=0.25)))
            await push(made, {"w": [0, 0]}, 3, call=call(101))
    await disk.shortened()
    ((count,),) = disk.store.rows("SELECT count(*) FROM parameters_event")
    assert count < 15
    after = await same_after_crash(disk, made)
    for each in (made, after):
        await push(each, {"w": [1, 1]}, call=call(200))
    assert after.newest.digest == made.newest.digest


async def test_a_snapshot_keeps_the_time(gradient_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 1)
    disk = gradient_disk
    made = await disk.parameters(rounds={"num_required": 2, "grace": 10.0})
    disk.bench.now += 1e6
    for worker_id in "ab":
        await push(made, {"w": [1, 0]}, worker_id=worker_id)
    disk.bench.now += 11.0
    made.go_on()
    await made.read(1, 10)
    await disk.shortened()
    for worker_id in "ab":
        await push(made, {"w": [1, 0]}, worker_id=worker_id)
    after = await disk.after_crash()
    found = after.found()
    assert ledger_of(found) == ledger_of(made)
    after.bench.now += 9.0
    found.go_on()
    assert found.state.step == 1
    after.bench.now += 2.0
    found.go_on()
    assert (await found.read(2, 10)).num_gradients == 2


# Faults of the disk


async def test_a_full_disk_refuses_versions_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    made = await disk.parameters(optimizer=adam(lr=0.5), rounds={"num_required": 2})
    await push(made, {"w": [1, 0]}, call=call(1), worker_id="a")
    before = shape_of(made), ledger_of(made)

    fill_disk(monkeypatch)
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await push(made, {"w": [3, 0]}, call=call(2), worker_id="b")
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await made.change(call(3), Changes(loaded=Loaded(arrays({"w": [7, 7]}))))
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await disk.bench.parameters(key=ResourceKey("test", "other"))
    assert (shape_of(made), ledger_of(made)) == before
    monkeypatch.undo()
    await push(made, {"w": [3, 0]}, call=call(2), worker_id="b")
    assert made.state.step == 1
    await same_after_crash(disk, made)
    disk.close()


async def test_a_round_that_found_the_disk_full_ends_later(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await disk.parameters(optimizer=adam(lr=0.5), rounds={"num_required": 1, "grace": 5.0})
    pull = asyncio.create_task(made.push_pull(call(1), Contribution(), opened({"w": [1, 0]}), None))
    await until_one_waits(disk, made)
    used = disk.bench.memory.used
    with monkeypatch.context() as patched:
        fill_disk(patched)
        disk.bench.now += 6.0
        made.go_on()
        with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
            await pull
    assert (made.state.step, made.state.num_updates, disk.bench.memory.used) == (0, 1, used)
    disk.bench.now += 6.0
    made.go_on()
    assert (await made.read(1, 10)).num_gradients == 1
    await same_after_crash(disk, made)


async def test_nobody_sees_a_version_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        disk = await Disk.open(tmp_path / level.value, level)
        made = await disk.parameters(rounds={"num_required": 1, "grace": 1.0})
        pull = asyncio.create_task(made.push_pull(None, Contribution(), opened({"w": [1, 0]}), None))
        await until_one_waits(disk, made)
        with monkeypatch.context() as patched:
            break_flushes(patched)
            disk.bench.now += 2.0
            made.go_on()
            with pytest.raises(UnavailableError, match="the server stops"):
                await pull
        with pytest.raises(UnavailableError, match="the server stops"):
            await made.read(None, 1)
        assert len(disk.failures) == 1
        disk.close()


async def test_a_sum_with_a_discount_is_there_again(gradient_disk: Disk) -> None:
    made = await gradient_disk.bench.parameters(
        rounds={"num_required": 3}, staleness=Staleness(1, PolynomialDiscount(1.0)), keep_versions=3
    )
    for worker in "xyz":
        await push(made, {"w": [1, 1]}, worker_id=worker)
    summands = tuple([Summand(weight, worker, call(1, worker)) for worker, weight in (("a", 1.0), ("b", 3.0))])
    of_two = Contribution(0, 4.0, "a", 1, sum_of=summands)
    pushed, _ = await made.push(call(1, "aggregator"), of_two, opened({"w": [4, 8]}))
    assert (pushed.weight, pushed.num_accumulated) == (2.0, 2)
    again = await same_after_crash(gradient_disk, made)
    for each in (made, again):
        repeated, duplicate = await each.push(call(1, "b"), Contribution(0, 3.0, "b"), opened({"w": [1, 1]}))
        assert (repeated.weight, duplicate) == (1.5, True)
        await push(each, {"w": [2, 2]}, weight=2.0, worker_id="c")
        assert shown(each.newest) == {"w": [1 + 6 / 4, 1 + 8 / 4]}
        assert [update.weight for update in each.records(1, 1)[0][0].updates] == [0.5, 1.5, 2.0]
