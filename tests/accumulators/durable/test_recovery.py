"""What a server finds when the one before it was killed."""

import asyncio
import json
import math
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient, SparseSlices, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape, Reduction
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.security.identity import Identity
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage.directory import StateError
from gradserve_server.storage.journal import Durability, Recording
from tests.accumulators.bench import F32, KEY, Bench, apply, opened, push_pull, take, value_of
from tests.accumulators.durable.disk import Disk, ledger_of
from tests.servers.polling import PATIENCE_SECONDS, eventually_async
from tests.storage.failing_disk import break_flushes, fill_disk

LEVELS = [Durability.ROUND, Durability.GRADIENT]


def call(sequence: int, client: str = "a", **fields: Any) -> RequestId:
    return RequestId(client, sequence, b"content", **fields)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    made = await Disk.open(tmp_path / "state")
    yield made
    made.store.close()


@pytest.mark.parametrize("durability", LEVELS)
async def test_a_round_that_has_ended_is_there(disk: Disk, durability: Durability) -> None:
    acc = await disk.create(durability=durability, keep_averages=2)
    for step in range(3):
        await apply(acc, 1, step, call=call(2 * step), local_step=step, worker_id="w")
        average, _ = await take(acc, 1, call=call(2 * step + 1))
    after = await disk.after_crash()
    found = after.found()
    assert ledger_of(found) == ledger_of(acc)
    assert (found.spec, found.incarnation) == (acc.spec, acc.incarnation)
    assert (found.state.global_step, found.state.kept_steps) == (3, (2, 3))
    again, duplicate = await take(found, 1, call=call(5))
    assert duplicate
    assert value_of(again) == value_of(average) == [1, 2]
    assert (again.step, again.num_gradients, again.worker_ids) == (3, 1, ("w",))
    assert [value_of(await found.read_average(step, 1)) for step in (2, 3)] == [[1, 1], [1, 2]]
    after.store.close()


async def test_at_round_the_current_round_begins_again(disk: Disk) -> None:
    acc = await disk.create(durability=Durability.ROUND)
    await apply(acc, 1, call=call(1))
    await take(acc, 1)
    await apply(acc, 5, call=call(2), local_step=1)
    after = await disk.after_crash()
    found = after.found()
    assert found.num_accumulated == 0
    applied, duplicate = await apply(found, 5, call=call(2), local_step=1)
    assert (applied.outcome, duplicate) == (Outcome.ACCEPTED, False)
    applied, duplicate = await apply(found, 1, call=call(1))
    assert duplicate
    assert value_of((await take(found, 1))[0]) == [5]
    after.store.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_at_gradient_every_gradient_counts_once_with_the_same_bits(disk: Disk, deterministic: bool) -> None:
    acc = await disk.create(durability=Durability.GRADIENT, deterministic=deterministic)
    never_crashed = Bench().accumulator(deterministic=deterministic)
    numbers = np.random.default_rng(5).normal(size=(5, 1000)).astype(np.float32)
    for sequence, values in enumerate(numbers):
        how = {"weight": 1.0 / (sequence + 3), "worker_id": f"w{9 - sequence}", "sequence": sequence}
        for each in (acc, never_crashed):
            await apply(each, *values, call=call(sequence), **how)
    after = await disk.after_crash()
    found = after.found()
    assert ledger_of(found) == ledger_of(acc)
    for sequence, values in enumerate(numbers):
        how = {"weight": 1.0 / (sequence + 3), "worker_id": f"w{9 - sequence}", "sequence": sequence}
        assert (await apply(found, *values, call=call(sequence), **how))[1], "it is known already"
    result, expected = [(await take(each, 5))[0].values[""] for each in (found, never_crashed)]
    assert result.tobytes() == expected.tobytes()
    after.store.close()


async def test_every_kind_of_value(disk: Disk) -> None:
    components = (
        ComponentSpec("h", np.dtype("bfloat16"), PartialShape((2, -1))),
        ComponentSpec("d", np.dtype(np.float64), PartialShape(())),
        ComponentSpec("s", np.dtype(np.float16), layout=Layout.SPARSE),
        ComponentSpec("e", F32, PartialShape((0, 3))),
    )
    key = ResourceKey("c", "model/ü \n")
    acc = await disk.create(
        *components, key=key, durability=Durability.GRADIENT, reduction=Reduction.SUM, accumulate_dtype=np.dtype("f8")
    )

    async def add() -> None:
        rows = SparseSlices(np.array([3, 1, 3]), np.ones((3, 2), np.float16), (9, 2))
        values: dict[str, Value] = {
            "h": np.full((2, 3), 1.5, "bfloat16"),
            "d": np.array(math.pi),
            "s": rows,
            "e": np.empty((0, 3), np.float32),
        }
        await acc.apply(None, Contribution(acc.rounds.global_step), opened(Gradient(values)))

    await add()
    await take(acc, 1)
    await add()
    after = await disk.after_crash()
    found = after.found(key)
    assert found.spec == acc.spec
    for is_taken in (False, True):
        if is_taken:
            for each in (found, acc):
                await take(each, 1)
        kept, expected = found._averages.history.newest(), acc._averages.history.newest()
        assert kept is not None
        assert expected is not None
        assert kept.round_number == expected.round_number == int(is_taken)
        for mine, theirs in zip(kept.arrays, expected.arrays, strict=True):
            assert mine.tobytes() == theirs.tobytes()
            assert not mine.flags.writeable
    after.store.close()


async def test_steps_that_were_set(disk: Disk) -> None:
    acc = await disk.create()
    await acc.set_global_step(41)
    after = await disk.after_crash()
    assert after.found().state.global_step == 41
    after.store.close()


async def test_answers_from_before_a_step_was_set_stay_as_they_were(disk: Disk) -> None:
    acc = await disk.create(durability=Durability.ROUND)
    first, _ = await apply(acc, 1, call=call(1))
    await acc.set_global_step(5)
    await take(acc, 1)
    after = await disk.after_crash()
    assert ledger_of(after.found()) == ledger_of(acc)
    again, duplicate = await apply(after.found(), 1, call=call(1))
    assert (again.global_step, duplicate) == (first.global_step, True) == (0, True)
    after.store.close()


async def test_an_average_without_bytes(disk: Disk) -> None:
    acc = await disk.create(durability=Durability.GRADIENT)
    await apply(acc, call=call(1))
    assert value_of((await take(acc, 1))[0]) == []
    after = await disk.after_crash()
    assert value_of(await after.found().read_average(1, 1)) == []
    after.store.close()


async def test_a_push_pull_that_was_cut_off_is_answered_by_the_next_server(tmp_path: Path) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    acc = await disk.create()
    await apply(acc, 1, call=call(1, "b"))
    after = await disk.after_crash()
    applied, average, duplicate = await push_pull(after.found(), 3, num_required=2, call=call(1))
    assert (applied.outcome, value_of(average), duplicate) == (Outcome.ACCEPTED, [2], False)
    last = await after.after_crash()
    _, average, duplicate = await push_pull(last.found(), 3, num_required=2, call=call(1))
    assert (value_of(average), duplicate) == ([2], True)
    for each in (disk, after, last):
        each.store.close()


@pytest.mark.parametrize("durability", LEVELS)
async def test_what_was_deleted_stays_deleted(disk: Disk, durability: Durability) -> None:
    acc = await disk.create(durability=durability)
    await apply(acc, 1)
    await take(acc, 1)
    await apply(acc, 1, local_step=1)
    disk.bench.registry.delete(KEY)
    await disk.journals.settle()
    after = await disk.after_crash()
    with pytest.raises(NotFoundError):
        after.found()
    assert after.store.blobs == []
    with pytest.raises(AbortedError):
        await apply(acc, 1)
    after.store.close()


async def test_space_for_an_average_that_never_comes_is_given_back(disk: Disk) -> None:
    acc = await disk.create()
    await apply(acc, 1)
    ending = asyncio.create_task(take(acc, 1))
    await asyncio.sleep(0)  # the space is being set aside
    disk.bench.registry.delete(KEY)
    with pytest.raises(AbortedError):
        await ending
    for _ in range(2):
        await disk.journals.settle()
    assert disk.store.segments.num_free == disk.store.segments.num_bytes > 0


async def test_an_accumulator_that_is_deleted_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    acc = await disk.create()
    fill_disk(monkeypatch)
    applying = asyncio.create_task(apply(acc, 1, call=call(1)))
    await asyncio.sleep(0)  # the gradient is being written
    disk.bench.registry.delete(KEY)
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await applying
    disk.store.close()


async def test_nothing_is_written_for_none(disk: Disk) -> None:
    acc = await disk.create(durability=Durability.NONE)
    await apply(acc, 1)
    await take(acc, 1)
    assert disk.store.rows("SELECT * FROM accumulator") == []


async def test_averages_that_nobody_can_ask_for_take_up_no_space(disk: Disk) -> None:
    acc = await disk.create(keep_averages=2)
    for step in range(10):
        await apply(acc, step, call=call(step), local_step=step)
        await take(acc, 1, call=call(step, "taker"))
    await disk.store.flush()
    assert len(disk.store.blobs) == 2
    assert len(disk.store.rows("SELECT * FROM average")) == 2


async def test_private_ones_stay_out_of_the_reach_of_others(disk: Disk) -> None:
    spec = AccumulatorSpec((ComponentSpec("", F32),))
    mine, yours = (ResourceKey("c", "private", Identity(name)) for name in ("me", "you"))
    disk.bench.registry.create(mine, spec, Lifetime(owner="me/1"))
    await disk.journals.settle()
    after = await disk.after_crash()
    assert after.found(mine).spec.components == spec.components
    with pytest.raises(NotFoundError):
        after.found(yours)
    after.store.close()


async def test_private_ones_keep_their_lifetime(disk: Disk) -> None:
    spec = AccumulatorSpec((ComponentSpec("", F32),))
    lifetime = Lifetime(owner="somebody", idle_lease=5.0)
    disk.bench.registry.create(KEY, spec, lifetime)
    await disk.journals.settle()
    after = await disk.after_crash()
    assert after.bench.registry.lifetime(KEY) == lifetime
    after.bench.now = 6.0
    after.bench.lifetimes.expire(Turn(100))
    with pytest.raises(NotFoundError):
        after.found()
    after.store.close()


async def test_the_default_and_what_differs_from_it(disk: Disk) -> None:
    acc = await disk.create()
    assert acc.spec.durability is Durability.ROUND
    spec = AccumulatorSpec((ComponentSpec("", F32),))
    assert disk.bench.registry.create(KEY, spec) == (acc, False)
    with pytest.raises(AlreadyExistsError, match="durability is ROUND, not GRADIENT"):
        await disk.create(durability=Durability.GRADIENT)
    with pytest.raises(InvalidArgumentError, match="expected NONE, as the server has no state directory, got ROUND"):
        Bench().accumulator(durability=Durability.ROUND)


async def test_limits_that_are_less_than_what_there_is(disk: Disk) -> None:
    await disk.create()
    await disk.create(key=ResourceKey("c", "other"))
    disk._limits = {"max_accumulators": 1}
    with pytest.raises(ResourceExhaustedError, match="accumulators"):
        await disk.after_crash()


# --- Journals are shortened


@pytest.mark.parametrize("durability", LEVELS)
async def test_many_events_become_one_ledger(
    disk: Disk, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 10)
    acc = await disk.create(durability=durability)
    for step in range(25):
        await apply(acc, 1, call=call(step), local_step=step, worker_id=f"w{step}")
        await take(acc, 1, call=call(step, "taker"))
    await apply(acc, 1, call=call(99), local_step=25)
    await disk.shortened()
    ((count,),) = disk.store.rows("SELECT count(*) FROM event")
    assert count < 15
    after = await disk.after_crash()
    if durability is Durability.ROUND:
        assert after.found().num_accumulated == 0
        await apply(after.found(), 1, call=call(99), local_step=25)
    assert ledger_of(after.found()) == ledger_of(acc)
    after.store.close()


@pytest.mark.parametrize("name", ["a?b", "run#1", "50%41", "ä b:c&d=e"])
async def test_paths_with_characters_that_mean_something_in_a_uri(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 4)
    disk = await Disk.open(tmp_path / name)
    acc = await disk.create()
    for step in range(3):
        await apply(acc, 1, local_step=step)
        await take(acc, 1)
    await disk.shortened()
    assert len(disk.store.rows("SELECT * FROM ledger")) == 1
    disk.store.close()
    assert os.listdir(tmp_path) == [name]


async def test_a_journal_that_cannot_be_shortened_says_so_and_grows(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 4)
    acc = await disk.create()
    with monkeypatch.context() as patched:
        patched.setattr(Recording, "replay", lambda *_: json.loads("x"))
        for step in range(2):
            await apply(acc, 1, local_step=step)
            await take(acc, 1)
        await disk.shortened()
    assert "the journal of accumulator 1 in " in caplog.text
    for step in range(2, 4):
        await apply(acc, 1, local_step=step)
        await take(acc, 1)
    await disk.shortened()
    assert len(disk.store.rows("SELECT * FROM ledger")) == 1


async def test_space_for_an_average_is_given_back_if_the_accumulator_is_deleted_before_the_round_ends(
    disk: Disk,
) -> None:
    acc = await disk.create()
    await apply(acc, 1)
    journal = disk.journals.of(KEY)
    await journal.reserve(1 << 20)
    await journal.reserve(2 << 20)
    await disk.store.flush()
    assert disk.store.segments.num_bytes - disk.store.segments.num_free == 2 << 20, "one of them is enough"
    disk.bench.registry.delete(KEY)
    await journal.reserve(1 << 20)
    await disk.store.flush()
    assert disk.store.segments.num_free == disk.store.segments.num_bytes > 0


async def test_an_older_ledger_never_takes_the_place_of_a_newer_one(disk: Disk) -> None:
    """Threads may end in another order than they began in."""
    acc = await disk.create()
    for step in range(4):
        await apply(acc, 1, call=call(step), local_step=step)
        await take(acc, 1)
    journal = disk.journals.of(KEY)
    for position in (journal.position, 3):
        await disk.journals.begin_snapshot(journal.number, position)
    await disk.store.flush()
    after = await disk.after_crash()
    assert ledger_of(after.found()) == ledger_of(acc)
    after.store.close()


async def test_an_accumulator_that_is_deleted_while_its_journal_is_shortened(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 1)
    acc = await disk.create()
    await apply(acc, 1)
    await take(acc, 1)
    disk.bench.registry.delete(KEY)
    await disk.shortened()
    assert disk.store.rows("SELECT * FROM ledger") == []
    assert not disk.failures


async def test_gradients_are_added_while_others_wait_for_the_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    acc = await disk.create(durability=Durability.GRADIENT)
    disk_is_ready = threading.Event()
    flush, flushes = os.fdatasync, []

    def flush_later(descriptor: int) -> None:
        disk_is_ready.wait(PATIENCE_SECONDS)
        flushes.append(descriptor)
        flush(descriptor)

    monkeypatch.setattr("os.fdatasync", flush_later)
    applying = [asyncio.create_task(apply(acc, number, call=call(number))) for number in range(5)]

    async def num_accumulated() -> int:
        return acc.num_accumulated

    await eventually_async(num_accumulated, lambda count: count == 5)
    applying.append(asyncio.create_task(apply(acc, 4, call=call(4))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(each.done() for each in applying), "what is not on disk was acknowledged"
    disk_is_ready.set()
    answers = await asyncio.gather(*applying)
    assert [duplicate for _, duplicate in answers] == [False] * 5 + [True]
    assert len(flushes) <= 2
    after = await disk.after_crash()
    assert ledger_of(after.found()) == ledger_of(acc)
    assert value_of((await take(after.found(), 5))[0]) == [2]
    after.store.close()


# --- Faults


async def test_a_gradient_that_could_not_be_written_is_not_acknowledged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    acc = await disk.create()

    break_flushes(monkeypatch)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the server stops"):
            await apply(acc, 1, call=call(1))
    disk.store.close()


async def test_a_full_disk_refuses_gradients_and_rounds_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    acc = await disk.create()
    await apply(acc, 1, call=call(1))

    fill_disk(monkeypatch)
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await apply(acc, 1, call=call(2))
    with pytest.raises(ResourceExhaustedError, match="no space in the state directory"):
        await take(acc, 1)
    assert acc.num_accumulated == 1
    monkeypatch.undo()
    await apply(acc, 3, call=call(2))
    assert value_of((await take(acc, 2))[0]) == [2]
    after = await disk.after_crash()
    assert ledger_of(after.found()) == ledger_of(acc)
    for each in (disk, after):
        each.store.close()


@pytest.mark.parametrize("durability", LEVELS)
async def test_nobody_sees_a_round_that_could_not_be_written(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await Disk.open(tmp_path / "state", durability)
    acc = await disk.create()
    await apply(acc, 1, call=call(1))

    break_flushes(monkeypatch)
    with pytest.raises(UnavailableError, match=r"the server stops: .*the state cannot be written: .*Input/output"):
        await take(acc, 1)
    assert (acc.state.global_step, acc.state.kept_steps) == (0, ())
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the server stops"):
            await take(acc, 1)
    with pytest.raises(UnavailableError, match="the server stops"):
        await apply(acc, 1, local_step=1)
    assert len(disk.failures) == 1
    monkeypatch.undo()
    disk.store.close()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("accumulator", "spec", "{}"),
        ("accumulator", "spec", "no json"),
        ("accumulator", "lifetime", '{"owner": 3, "more": 4}'),
        ("event", "record", '{"event": "surprise"}'),
        ("event", "record", "[]"),
        ("gradient", "contribution", '{"height": 1}'),
        ("gradient", "names", "[]"),
        ("average", "record", '{"round_number": 0}'),
        ("average", "names", '[["", {}]]'),
        ("blob", "arrays", '[["float99", [2]]]'),
        ("blob", "extents", "[[1]]"),
    ],
)
async def test_records_that_are_damaged(tmp_path: Path, table: str, column: str, value: str) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    acc = await disk.create()
    await apply(acc, 1)
    await take(acc, 1)
    await apply(acc, 1, local_step=1)
    disk.store._database.execute(f"UPDATE {table} SET {column} = ?", (value,))
    disk.store.close()
    expected = r"state: the record of accumulator 'test/acc' cannot be used: "
    if table == "blob":
        expected = r"state/metadata.sqlite: blob \d is damaged: "
    with pytest.raises(StateError, match=expected):
        await Disk.open(tmp_path / "state")


async def test_a_gradient_that_is_gone(tmp_path: Path) -> None:
    disk = await Disk.open(tmp_path / "state", Durability.GRADIENT)
    await apply(await disk.create(), 1)
    disk.store._database.execute("DELETE FROM gradient")
    disk.store.close()
    with pytest.raises(StateError, match="'test/acc' cannot be used: expected 1 gradients of the current round, got 0"):
        await Disk.open(tmp_path / "state")


async def test_records_are_json(disk: Disk) -> None:
    acc = await disk.create(durability=Durability.GRADIENT)
    await apply(acc, 1, call=call(1), worker_id="w")
    await take(acc, 1, call=call(2))
    await disk.store.flush()
    for table, column in (("accumulator", "spec"), ("event", "record"), ("average", "record")):
        for (text,) in disk.store.rows(f"SELECT {column} FROM {table}"):
            assert isinstance(json.loads(text), dict)
