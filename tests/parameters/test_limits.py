"""Limits of memory: what exceeds them is refused before anything changes."""

import itertools
from collections.abc import AsyncIterator
from sys import getsizeof
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Measurement
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import (
    ResourceExhaustedError,
)
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.variables import Loaded, Variables
from gradserve_server.resources.registry import ResourceKey
from tests.parameters.bench import KEY, ParametersBench, adam, arrays, opened, push, sgd, shown
from tests.parameters.checks import emptied, fails

OTHER = ResourceKey("test", "other")


@pytest.fixture
async def bench() -> AsyncIterator[ParametersBench]:
    """Checks at the end that deleted parameters leave nothing behind."""
    async with emptied(ParametersBench()) as bench:
        yield bench


BYTES = 1000
"""The size of a version, and of a slot."""
VALUES = {"w": np.zeros(BYTES // 4, np.float32)}


@pytest.mark.parametrize(
    ("optimizer", "values", "needed"),
    [
        (sgd(), VALUES, BYTES),
        (sgd(momentum=0.5), VALUES, 2 * BYTES),
        (adam(lr=1.0), VALUES, 3 * BYTES),
        (adam(lr=1.0), {"w": np.zeros(BYTES // 2, ml_dtypes.bfloat16)}, BYTES + 3 * 2 * BYTES),
        (adam(lr=1.0), {"w": np.zeros(BYTES // 8, np.float64)}, 3 * BYTES),
    ],
    ids=["sgd", "momentum", "adam", "bfloat16", "float64"],
)
@pytest.mark.parametrize("held", [False, True], ids=["running", "held"])
async def test_parameters_are_created_if_there_is_memory_for_values_and_state(
    optimizer: Optimizer, values: dict[str, Any], needed: int, held: bool
) -> None:
    bench = ParametersBench(limit=needed - 1)
    with pytest.raises(ResourceExhaustedError, match="tensor memory"):
        await bench.parameters(values, optimizer=optimizer, deterministic=held)
    assert not bench.registry.has(KEY)
    assert (bench.memory.used, bench.bookkeeping.used) == (0, 0)
    bench = ParametersBench(limit=needed)
    await bench.parameters(values, optimizer=optimizer, deterministic=held)
    assert bench.memory.used == needed


async def test_a_version_for_which_there_is_no_memory_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ParametersBench(limit=2 * BYTES)
    made = await bench.parameters(VALUES, keep_versions=1)
    pull = made.push_pull(RequestId("a", 1), Contribution(worker_id="a"), opened({"w": VALUES["w"] + 1}), None)
    with pytest.raises(ResourceExhaustedError, match="tensor memory"):
        await pull
    assert (made.state.step, made.state.num_updates, bench.memory.used) == (0, 1, 2 * BYTES)
    await fails(made, ResourceExhaustedError, made.change(None, Changes(loaded=Loaded(VALUES))))
    bench.memory.limit = 3 * BYTES
    made.go_on()
    assert made.state.step == 0, "it waits a while"
    bench.now += 1.5
    made.go_on()
    assert (made.state.step, bench.memory.used) == (1, BYTES)
    again, version, duplicate = await made.push_pull(
        RequestId("a", 1), Contribution(worker_id="a"), opened({"w": VALUES["w"] + 1}), None
    )
    assert (again.outcome, version.step, duplicate) == (Outcome.ACCEPTED, 1, True)


async def test_another_optimizer_needs_memory_for_its_state() -> None:
    bench = ParametersBench(limit=3 * BYTES)
    made = await bench.parameters(VALUES, optimizer=sgd(momentum=0.5))
    await fails(made, ResourceExhaustedError, made.change(None, Changes(adam(lr=1.0))), "tensor memory")
    assert bench.memory.used == 2 * BYTES
    await made.change(None, Changes(sgd(lr=2.0, momentum=0.75)))
    assert bench.memory.used == 2 * BYTES, "the same state goes on"
    bench.memory.limit = 4 * BYTES
    await made.change(None, Changes(adam(lr=1.0)))
    assert bench.memory.used == 4 * BYTES
    await made.change(None, Changes(sgd(momentum=0.5)))
    assert bench.memory.used == 2 * BYTES


async def test_another_optimizer_that_is_taken_back_has_changed_nothing(bench: ParametersBench) -> None:
    made = await bench.parameters(optimizer=sgd(momentum=0.5))
    await push(made, {"w": [8, 8]})
    for optimizer in (adam(lr=1.0), sgd(momentum=0.5)):
        await made.change(None, Changes(optimizer))
    await push(made, {"w": [8, 8]})
    assert shown(made.newest) == {"w": [20, 20]}


async def test_no_memory_in_the_machine_is_an_exhausted_resource(
    bench: ParametersBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await bench.parameters(optimizer=sgd(momentum=0.5))

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        for name in ("stage_load", "stage_optimizer", "stage_step"):
            patched.setattr(Variables, name, full)
        with pytest.raises(ResourceExhaustedError, match="no memory left"):
            await bench.parameters(key=OTHER)
        for changes in (Changes(loaded=Loaded(arrays({"w": [1, 1]}))), Changes(adam(lr=1.0))):
            await fails(made, ResourceExhaustedError, made.change(None, changes), "no memory left")
        with pytest.raises(ResourceExhaustedError, match="no memory left"):
            await made.push_pull(None, Contribution(), opened({"w": [8, 8]}), None)
    bench.now += 2.0
    made.go_on()
    assert shown(made.newest) == {"w": [8, 8]}


async def test_the_bookkeeping_of_updates_without_a_name_is_limited() -> None:
    bench = ParametersBench()
    made = await bench.parameters(rounds={"num_required": 1 << 20})
    bench.bookkeeping.limit = bench.bookkeeping.used + 10 * 768
    for _ in range(10):
        await push(made, {"w": [1, 1]})
    await fails(made, ResourceExhaustedError, push(made, {"w": [1, 1]}), "bookkeeping")


async def test_measurements_of_updates_count_until_their_round_ends(bench: ParametersBench) -> None:
    parameters = await bench.parameters(rounds={"num_required": 2})
    before = bench.bookkeeping.used
    far = Measurement(1, (1.0,), {f"{number:032x}": (1.0, 2.0**-60) for number in range(1000)})
    limit, bench.bookkeeping.limit = bench.bookkeeping.limit, before + 100_000
    await fails(parameters, ResourceExhaustedError, push(parameters, {"w": [1, 1]}, measured=(far,)), "bookkeeping")
    assert bench.bookkeeping.used == before
    bench.bookkeeping.limit = limit
    await push(parameters, {"w": [1, 1]}, measured=(far,))
    assert bench.bookkeeping.used > before + 200_000
    await push(parameters, {"w": [1, 1]})
    assert bench.bookkeeping.used < before + 10_000


async def test_records_of_rounds_count_in_the_budget_of_bookkeeping(bench: ParametersBench) -> None:
    made = await bench.parameters(keep_rounds=2, rounds={"num_required": 2})
    worker_ids = ["a", 200 * "b"]
    used = []
    for _ in range(4):
        for worker_id in worker_ids:
            await push(made, {"w": [1, 1]}, worker_id=worker_id)
        used.append(bench.bookkeeping.used)
    record = 768 + sum(272 + getsizeof(each) for each in worker_ids)
    assert [later - each for each, later in itertools.pairwise(used)] == [record, 0, 0], "two are kept"


async def test_the_oldest_records_go_when_there_is_no_room_for_another(bench: ParametersBench) -> None:
    made = await bench.parameters(keep_rounds=1000)
    for _ in range(5):
        await push(made, {"w": [1, 1]})
    bench.bookkeeping.limit = bench.bookkeeping.used + 768  # room for an update, but not for a record
    for step in range(6, 9):
        await push(made, {"w": [1, 1]})
        records, _ = made.records(0, 100)
        assert [each.step for each in records] == list(range(step - 4, step + 1))
        assert all(later.chained(each.hash) == later for each, later in itertools.pairwise(records))
    bench.bookkeeping.limit = 768
    with pytest.raises(ResourceExhaustedError, match="bookkeeping"):
        await push(made, {"w": [1, 1]})
    assert len(made.records(0, 100)[0]) == 5, "only a record takes the room of others"


async def test_the_newest_record_stays_if_there_is_no_room_at_all(bench: ParametersBench) -> None:
    made = await bench.parameters()
    bench.bookkeeping.limit = bench.bookkeeping.used + 768
    await push(made, {"w": [1, 1]})
    assert [each.step for each in made.records(0, 100)[0]] == [1]
