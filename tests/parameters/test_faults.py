"""Limits, deletions, cancellations and wrong updates: what is refused changes nothing, and the rest goes on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
)
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.reductions.spec import Krum
from gradserve_server.parameters.round_rules import ExponentialDiscount, RoundRules, Staleness
from gradserve_server.parameters.variables import Loaded, Variables
from gradserve_server.resources.lifetimes import SHARED
from gradserve_server.resources.registry import ResourceKey
from tests.parameters.bench import KEY, ParametersBench, adam, arrays, opened, push, sgd, shown
from tests.parameters.checks import emptied, fails, turns

OTHER = ResourceKey("test", "other")


@pytest.fixture
async def bench() -> AsyncIterator[ParametersBench]:
    """Checks at the end that deleted parameters leave nothing behind."""
    async with emptied(ParametersBench()) as bench:
        yield bench


# Wrong updates


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("update", "contribution", "field", "match"),
    [
        ({"w": np.zeros(3, np.float32)}, {}, "gradient[w].dense.shape", "Shape mismatch"),
        ({"w": np.zeros((), np.float32)}, {}, "gradient[w].dense.shape", "Shape mismatch"),
        ({"w": [NAN, 0]}, {}, "gradient[w].dense", "finite"),
        ({"w": [0, -INF]}, {}, "gradient[w].dense", "finite"),
        ({"w": np.array([1e39, 0])}, {}, "gradient[w].dense", "float32"),
        ({"w": [0, 0]}, {"weight": 0.0}, "weight", "positive, finite weight, got 0"),
        ({"w": [0, 0]}, {"weight": -1.0}, "weight", "positive, finite weight, got -1"),
        ({"w": [0, 0]}, {"weight": NAN}, "weight", "got nan"),
        ({"w": [0, 0]}, {"weight": INF}, "weight", "got inf"),
        ({"w": [0, 0]}, {"weight": 1e39}, "weight", "got 1e\\+39"),
        ({"w": [0, 0]}, {"weight": 2.0**-65}, "weight", "expected a weight from 2"),
        ({"w": [0, 0]}, {"weight": 2.0**-64, "local_step": 0}, "weight", "expected a weight from 2"),
        ({"w": [0, 0]}, {"local_step": 2}, "local_step", "at most 1"),
    ],
    ids=str,
)
async def test_updates_that_are_wrong(
    bench: ParametersBench, update: Any, contribution: dict[str, Any], field: str, match: str
) -> None:
    made = await bench.parameters(
        {"w": np.zeros(2, np.float32), "b": np.zeros(1)}, staleness=Staleness(1, ExponentialDiscount(0.5))
    )
    await push(made, {"w": [1, 1]})
    used = bench.memory.used, bench.bookkeeping.used
    call = RequestId("a", 1)
    await fails(
        made,
        InvalidArgumentError,
        made.push(call, Contribution(**{"local_step": 1, **contribution}), opened(update)),
        match,
        field,
    )
    assert (bench.memory.used, bench.bookkeeping.used) == used
    applied, duplicate = await made.push(call, Contribution(1), opened({"w": [1, 1]}))
    assert (applied.outcome, duplicate) == (Outcome.ACCEPTED, False), "the id is still free"


@pytest.mark.parametrize(
    ("names", "field", "match"),
    [
        ([], "update", "at least one component"),
        (["w", "w"], "update", "every component once"),
        (["w", "x"], "update[1].name", "got 'x'"),
    ],
)
async def test_names_that_are_wrong(bench: ParametersBench, names: list[str], field: str, match: str) -> None:
    made = await bench.parameters({"w": [0, 0], "b": [0]})
    with pytest.raises(InvalidArgumentError, match=match) as raised:
        made.spec.of_update(names)
    assert raised.value.field == field


async def test_krum_needs_every_component(bench: ParametersBench) -> None:
    made = await bench.parameters({"w": [0, 0], "b": [0]}, reduction=Krum(0), rounds={"num_required": 3})
    assert made.spec.of_update(["b", "w"]).components == made.spec.components
    with pytest.raises(InvalidArgumentError, match="b"):
        made.spec.of_update(["w"])


async def test_infinite_values_may_be_allowed(bench: ParametersBench) -> None:
    made = await bench.parameters(refuse_non_finite=False)
    await push(made, {"w": [INF, 1]})
    assert shown(made.newest) == {"w": [INF, 1]}


async def test_one_push_for_a_call_that_changed_rules_and_the_reverse(bench: ParametersBench) -> None:
    made = await bench.parameters()
    await made.change(RequestId("a", 1), Changes(sgd(lr=2.0)))
    await push(made, {"w": [1, 1]}, call=RequestId("a", 2))
    with pytest.raises(InvalidArgumentError, match="request_id a:1"):
        await push(made, {"w": [1, 1]}, call=RequestId("a", 1))
    with pytest.raises(InvalidArgumentError, match="request_id a:2"):
        await made.change(RequestId("a", 2), Changes(sgd(lr=3.0)))


async def test_a_change_that_is_sent_again_does_not_undo_later_ones(bench: ParametersBench) -> None:
    made = await bench.parameters(optimizer=sgd(lr=1.0))
    for call, lr in ((1, 1.0), (2, 2.0), (1, 1.0)):
        await made.change(RequestId("chief", call), Changes(sgd(lr=lr)))
    assert made.spec.rules.optimizer == sgd(lr=2.0)


async def test_values_of_other_dtypes_are_converted(bench: ParametersBench) -> None:
    made = await bench.parameters(loaded=Loaded({"w": np.array([1, 2])}))
    await made.change(None, Changes(loaded=Loaded({"w": np.array([0.1, 2**-140])})))
    assert shown(made.newest) == {"w": [float(np.float32(0.1)), 2**-140]}


@pytest.mark.parametrize(
    ("loaded", "step", "field"),
    [
        (Loaded({}), None, "values"),
        (Loaded(arrays({"w": [0, 0], "x": [0]})), None, "values"),
        (Loaded(arrays({"w": [0, 0, 0]})), None, "values"),
        (Loaded({"w": np.array([0, 1e39])}), None, "values"),
        (Loaded(arrays({"w": [0, 0]}), -1), None, "step"),
    ],
    ids=["missing", "unknown", "shape", "range", "step"],
)
async def test_values_that_cannot_be_loaded(
    bench: ParametersBench, loaded: Loaded, step: int | None, field: str
) -> None:
    made = await bench.parameters()
    await push(made, {"w": [1, 1]})
    await fails(
        made, InvalidArgumentError, made.change(RequestId("a", 1), Changes(loaded=loaded, step=step)), field=field
    )


async def test_the_state_of_another_optimizer_cannot_be_loaded(bench: ParametersBench) -> None:
    made = await bench.parameters(optimizer=sgd(momentum=0.5))
    async with made.reading_state() as (_, state):
        loaded = Loaded(arrays({"w": [1, 1]}), 0, state)
        await fails(
            made,
            InvalidArgumentError,
            made.change(None, Changes(adam(lr=1.0), loaded=loaded)),
            "expected the state of Adam",
            "state.optimizer",
        )
        await made.change(None, Changes(loaded=loaded))


async def test_readers_of_steps_that_a_load_leaves_out(bench: ParametersBench) -> None:
    made = await bench.parameters()
    reads = [asyncio.create_task(made.read(step, None)) for step in (3, 7, 9)]
    await turns()
    await made.change(None, Changes(loaded=Loaded(arrays({"w": [1, 1]})), step=7))
    await turns()
    assert isinstance(reads[0].exception(), OutOfRangeError)
    assert shown(reads[1].result()) == {"w": [1, 1]}
    assert not reads[2].done()
    for _ in range(2):
        await push(made, {"w": [1, 1]})
    assert shown(await reads[2]) == {"w": [3, 3]}


async def test_the_optimizer_of_a_fork_is_that_of_the_next_round(bench: ParametersBench) -> None:
    made = await bench.parameters(optimizer=sgd(momentum=0.5), rounds={"num_required": 2})
    await push(made, {"w": [8, 8]}, worker_id="a")
    await made.change(None, Changes(adam(lr=0.5), rounds=RoundRules(1)))
    fork = await bench.registry.fork(KEY, "", None, OTHER, SHARED)
    assert fork.spec == made.spec
    await push(fork, {"w": [8, -8]})
    assert shown(fork.newest) == {"w": pytest.approx([0.5, -0.5])}
    assert shown(made.newest) == {"w": [0, 0]}


# Deletions


def calls(made: Parameters) -> dict[str, Any]:
    return {
        "push_pull": made.push_pull(None, Contribution(worker_id="a"), opened({"w": [1, 1]}), None),
        "read": made.read(5, None),
    }


async def test_waiting_calls_end_when_parameters_are_deleted(bench: ParametersBench) -> None:
    made = await bench.parameters(rounds={"num_required": 2})
    waiting = {name: asyncio.create_task(call) for name, call in calls(made).items()}
    await turns()
    assert bench.registry.delete(KEY)
    await turns()
    for name, task in waiting.items():
        assert isinstance(task.exception(), AbortedError), name
        assert "were deleted" in str(task.exception())
    for call in calls(made).values():
        with pytest.raises(AbortedError):
            await call
    with pytest.raises(AbortedError):
        async with made.reading_state():
            pass
    assert not bench.registry.delete(KEY)
    assert (bench.memory.used, bench.bookkeeping.used) == (0, 0)


class SlowCompute:
    """Work that goes on while the loop does other things.

    Attributes:
        begun: Set when work has begun.
        go_on: Cleared to hold work up.
    """

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def run(self, _num_bytes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        await asyncio.sleep(0)
        return function(*args, **kwargs)


def slow(bench: ParametersBench) -> SlowCompute:
    compute = SlowCompute()
    object.__setattr__(bench.factory.places.host, "compute", compute)
    return compute


@pytest.mark.parametrize(
    "changes",
    [None, Changes(adam(lr=1.0)), Changes(loaded=Loaded(arrays({"w": [1, 1]})))],
    ids=["round", "optimizer", "load"],
)
async def test_parameters_that_are_deleted_while_they_change(bench: ParametersBench, changes: Changes | None) -> None:
    made = await bench.parameters()
    compute = slow(bench)
    changing = asyncio.create_task(push(made, {"w": [1, 1]}) if changes is None else made.change(None, changes))
    await compute.begun.wait()
    bench.registry.delete(KEY)
    compute.go_on.set()
    await asyncio.wait([changing])
    await turns()
    assert (bench.memory.used, bench.bookkeeping.used) == (0, 0)


# Creators


async def creating(bench: ParametersBench, **kwargs: Any) -> "asyncio.Task[Parameters]":
    task = asyncio.create_task(bench.parameters(**kwargs))
    await turns(2)
    return task


async def test_the_second_creator_finds_what_the_first_has_made(bench: ParametersBench) -> None:
    compute = slow(bench)
    first = await creating(bench, values={"w": [1, 1]})
    others = [await creating(bench, values={"w": [2, 2]}) for _ in range(2)]
    finding = asyncio.create_task(bench.registry.create(KEY, (await spec(bench)), SHARED, None))
    await turns(2)
    for look in (bench.registry.get, bench.registry.use):
        with pytest.raises(NotFoundError, match="being created"):
            look(KEY)
    assert (bench.registry.has(KEY), list(bench.registry.all()), bench.registry.page("test", "", 9)) == (False, [], [])
    compute.go_on.set()
    made = await first
    assert [await other for other in others] == [made] * 2
    assert await finding == (made, False)
    assert shown(made.newest) == {"w": [1, 1]}
    assert [key for key, _ in bench.registry.page("test", "", 9)] == [KEY]


async def spec(bench: ParametersBench) -> Any:
    other = ParametersBench()
    return (await other.parameters()).spec


async def test_if_the_first_creator_fails_the_second_creates(
    bench: ParametersBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = slow(bench)
    first = await creating(bench, values={"w": [1, 1]})
    second = await creating(bench, values={"w": [2, 2]})

    stage = Variables.stage_load

    def full_once(*args: Any) -> Any:
        monkeypatch.setattr(Variables, "stage_load", stage)
        raise MemoryError

    monkeypatch.setattr(Variables, "stage_load", full_once)
    compute.go_on.set()
    with pytest.raises(ResourceExhaustedError):
        await first
    assert shown((await second).newest) == {"w": [2, 2]}


async def test_a_creator_that_leaves_takes_its_parameters_along(bench: ParametersBench) -> None:
    compute = slow(bench)
    first = await creating(bench, values={"w": [1, 1]})
    second = await creating(bench, values={"w": [2, 2]})
    first.cancel()
    await turns()
    assert first.cancelled()
    compute.go_on.set()
    assert shown((await second).newest) == {"w": [2, 2]}
    assert bench.memory.used == 8


async def test_parameters_that_are_deleted_while_they_are_created(bench: ParametersBench) -> None:
    compute = slow(bench)
    first = await creating(bench, values={"w": [1, 1]})
    bench.registry.delete(KEY)
    second = await creating(bench, values={"w": [2, 2]})
    compute.go_on.set()
    await asyncio.wait([first])
    made = await second
    assert shown(made.newest) == {"w": [2, 2]}
    assert bench.registry.get(KEY) is made
    assert bench.memory.used == 8


async def test_parameters_without_values_are_only_found(bench: ParametersBench) -> None:
    with pytest.raises(NotFoundError, match="create them with values"):
        await bench.registry.create(KEY, await spec(bench), SHARED, None)
    await bench.parameters({"v": [1]})
    with pytest.raises(AlreadyExistsError, match="other properties"):
        await bench.registry.create(KEY, await spec(bench), SHARED, None)


# Rounds that fail


async def test_a_round_whose_end_fails_is_tried_again(bench: ParametersBench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await bench.parameters(optimizer=sgd(momentum=0.5), rounds={"num_required": 2})
    reserve, tries = RoundSum.reserve_result, []

    async def fail(_: RoundSum) -> Any:
        tries.append(1)
        raise ResourceExhaustedError("no memory for the version")

    monkeypatch.setattr(RoundSum, "reserve_result", fail)
    pulls = [
        asyncio.create_task(
            made.push_pull(RequestId(name, 1), Contribution(worker_id=name), opened({"w": [value, 0]}), None)
        )
        for name, value in (("a", 2), ("b", 4))
    ]
    done, _ = await asyncio.wait(pulls)
    assert all(isinstance(each.exception(), ResourceExhaustedError) for each in done)
    await push(made, {"w": [9, 9]}, worker_id="a")
    assert len(tries) == 1, "not at once"
    bench.now += 1.5
    made.go_on()
    await turns()
    assert (len(tries), made.state.step, made.state.num_updates) == (2, 0, 2)
    monkeypatch.setattr(RoundSum, "reserve_result", reserve)
    bench.now += 1.5
    made.go_on()
    await turns()
    again = [
        await made.push_pull(RequestId(name, 1), Contribution(worker_id=name), opened({"w": [value, 0]}), None)
        for name, value in (("a", 2), ("b", 4))
    ]
    assert [(shown(version), duplicate) for _, version, duplicate in again] == [({"w": [3, 0]}, True)] * 2
