"""Every change of a layer goes through one event, which a journal learns of before it takes effect."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.errors import ServiceError, UnavailableError
from gradserve_server.layers.batch_norm.config import RandomAdjustment
from gradserve_server.layers.batch_norm.events import (
    AdjustmentDrawn,
    BackwardEnded,
    Event,
    ForwardEnded,
    ForwardsExpired,
    ForwardsReleased,
    UpdatesRun,
    VariablesCreated,
    VariablesSet,
)
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.records import ArrayNumbers, event_of, event_records
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.layers.variables import NamedInitializer
from tests.journals import ListedJournal
from tests.layers.bench import KEY, LayerBench, bits, contents

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 3)).astype(np.float32)
DY = RANDOM.standard_normal((4, 3)).astype(np.float32)
REMEMBERED = 5
LEGACY = "weights and 16 bits"

CONFIGS: dict[str, dict[str, Any]] = {
    "delayed": {"scale": True},
    "in place": {"updates_collections": None},
    LEGACY: {"updates_collections": "mine", "fused": False},
    "zero debias": {"zero_debias_moving_mean": True, "fused": False},
    "renorm": {"renorm": True, "renorm_clipping": {"rmax": 1.5, "dmax": 0.5}},
    "renorm as it was": {"renorm": True, "renorm_zero_debias": True},
    "random": {
        "scale": True,
        "activation_fn": "gelu",
        "param_initializers": {"gamma": NamedInitializer("normal", {})},
        "adjustment": RandomAdjustment((0.5, 1.5), (-1.0, 1.0)),
    },
}


class Worker:
    """Calls a layer by letters."""

    def __init__(self, bench: LayerBench, config: str) -> None:
        self.bench = bench
        self.config = config
        self.layer: BatchNormLayer = bench.layer(**CONFIGS[config])

        self.dtype = ml_dtypes.bfloat16 if config == LEGACY else np.float32

    def forward(self, forward_id: str, **call: Any) -> Awaitable[ForwardResult]:
        x = (X * (1 + len(forward_id) + ord(forward_id[0]) % 7)).astype(self.dtype)
        weights = np.array([1, 0.5, 0, 2], np.float32) if self.config == LEGACY else None
        given = ForwardCall(**{"forward_id": forward_id, "lease": 10, "keep_for_backward": True, **call})
        return self.layer.forward(CallInputs(x, weights), given, on_host=True)

    async def backward(self, forward_id: str, *, retain: bool = False) -> Any:
        call = self.layer.check_backward(forward_id, DY.astype(self.dtype))
        return await self.layer.backward(call, retain=retain, on_host=True)

    async def set_beta(self) -> None:
        beta = self.layer.get_variables(["beta"])["beta"]
        await self.layer.set_variables({"beta": np.full_like(beta, 0.25)})

    async def expire(self) -> int:
        self.bench.now += 6
        return await self.bench.registry.expire()


STEPS: dict[str, Callable[[Worker], Awaitable[Any]]] = {
    "forward": lambda worker: worker.forward("a"),
    "forward again": lambda worker: worker.forward("a"),
    "another": lambda worker: worker.forward("b", released=["a"]),
    "updates": lambda worker: worker.layer.run_updates(()),
    "a forward for its updates": lambda worker: worker.forward("c", keep_for_backward=False),
    "inference": lambda worker: worker.forward("d", is_training=False),
    "inference that keeps nothing": lambda worker: worker.forward("e", is_training=False, keep_for_backward=False),
    "backward": lambda worker: worker.backward("b"),
    "set": lambda worker: worker.set_beta(),
    "backward that retains": lambda worker: worker.backward("d", retain=True),
    "half of a lease": lambda worker: worker.expire(),
    "one more": lambda worker: worker.forward("f"),
    "some updates": lambda worker: worker.layer.run_updates(("f",)),
    "the other half": lambda worker: worker.expire(),
    "one that expired": lambda worker: worker.forward("c", lease=100),
    "release": lambda worker: worker.layer.release(("f", "nobody"), with_updates=False),
    "more than are remembered": lambda worker: worker.forward("g"),
    "release with updates": lambda worker: worker.layer.release(("g",), with_updates=True),
    "the last": lambda worker: worker.forward("h", lease=100),
}


def journaled(config: str) -> tuple[Worker, ListedJournal[Event]]:
    journal: ListedJournal[Event] = ListedJournal()
    return Worker(LayerBench(journal=journal, remembered=REMEMBERED), config), journal


def written(event: Event) -> Event:
    """Returns the event as it is after it was written down, and read."""
    there = ArrayNumbers()
    record = json.loads(json.dumps(event_records(there).record(event)))
    return event_records(ArrayNumbers([each.copy() for each in there.arrays])).event(record)


async def answers(worker: Worker) -> list[Any]:
    """Returns what a layer says to calls of all kinds from now on."""
    found: list[Any] = []
    for name in "abcdefgh":
        try:
            found.append(bits(named(await worker.backward(name))))
        except ServiceError as error:
            found.append((type(error), error.message))
    for name in "abcdefghi":
        made = await worker.forward(name)
        drawn = () if made.drawn is None else made.drawn
        found.append((made.outputs.tobytes(), made.has_pending_updates, [part.tobytes() for part in drawn]))
    found.append(await worker.layer.run_updates(()))
    return [*found, contents(worker.layer)]


def named(computed: Any) -> dict[str, Any]:
    return {name: array for name, array in vars(computed.outputs).items() if array is not None}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("is_written", [False, True], ids=["as they are", "as records"])
async def test_events_make_the_same_layer_again(config: str, is_written: bool) -> None:
    worker, journal = journaled(config)
    for step in STEPS.values():
        await step(worker)
        other = Worker(LayerBench(remembered=REMEMBERED), config)
        for event in journal.events:
            other.layer.replay(written(event) if is_written else event)
        assert contents(other.layer) == contents(worker.layer)
        assert other.bench.memory.used == worker.bench.memory.used
        assert other.bench.handles.used == worker.bench.handles.used
    other.bench.now = worker.bench.now
    assert await answers(other) == await answers(worker)


async def test_each_change_is_one_event() -> None:
    worker, journal = journaled("random")
    layer = worker.layer
    for step in STEPS.values():
        await step(worker)
    assert [type(event) for event in journal.events[:4]] == [
        VariablesCreated,
        AdjustmentDrawn,
        ForwardEnded,
        ForwardEnded,
    ]
    assert {type(event) for event in journal.events} == {
        VariablesCreated,
        VariablesSet,
        AdjustmentDrawn,
        ForwardEnded,
        UpdatesRun,
        BackwardEnded,
        ForwardsReleased,
        ForwardsExpired,
    }
    journal.events.clear()
    # What changes nothing is none.
    await worker.backward("h", retain=True)
    await worker.forward("i", is_training=False, keep_for_backward=False, released=["nobody"])
    await layer.release(("nobody",), with_updates=True)
    await layer.run_updates(("nobody",))
    await layer.expire()
    await layer.build(np.dtype(np.float32), (-1, 3))
    assert journal.events == []


def test_unknown_events_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a known event, got 'else'"):
        event_of({"event": "else"})


CHANGES: dict[str, Callable[[Worker], Awaitable[Any]]] = {
    "forward": lambda worker: worker.forward("x", released=["a"]),
    "forward again": lambda worker: worker.forward("a"),
    "forward in inference": lambda worker: worker.forward("x", is_training=False),
    "a forward that releases": lambda worker: worker.forward(
        "x", is_training=False, keep_for_backward=False, released=["a"]
    ),
    "backward": lambda worker: worker.backward("a"),
    "run_updates": lambda worker: worker.layer.run_updates(()),
    "set_variables": lambda worker: worker.set_beta(),
    "release": lambda worker: worker.layer.release(("a",), with_updates=True),
    "expire": lambda worker: worker.layer.expire(),
}


CASES = [
    (config, name)
    for config in ("delayed", "in place", "random")
    for name in CHANGES
    if (config, name) != ("in place", "run_updates")  # which changes nothing
]


async def prepared(config: str) -> tuple[Worker, ListedJournal[Event]]:
    """Returns a layer with a forward that a call can do anything with."""
    worker, journal = journaled(config)
    await worker.forward("a", lease=100)
    await worker.forward("old", lease=1)
    worker.bench.now += 2
    return worker, journal


@pytest.mark.parametrize(("config", "name"), CASES)
async def test_what_the_journal_refuses_has_not_happened(config: str, name: str) -> None:
    worker, journal = await prepared(config)
    change = CHANGES[name]
    before, used = contents(worker.layer), worker.bench.memory.used
    journal.failure = UnavailableError("the disk is full")
    with pytest.raises(UnavailableError, match="the disk is full"):
        await change(worker)
    assert contents(worker.layer) == before
    assert (worker.bench.memory.used, worker.bench.handles.used) == (used, len(worker.layer.forwards))
    journal.failure = None
    await change(worker)
    assert contents(worker.layer) != before


@pytest.mark.parametrize(("config", "name"), CASES)
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["goes on", "is cancelled"])
async def test_nothing_shows_before_the_journal_has_it(config: str, name: str, is_cancelled: bool) -> None:
    worker, journal = await prepared(config)
    before = contents(worker.layer)
    changing = asyncio.ensure_future(CHANGES[name](worker))
    await journal.hold()
    assert not changing.done()
    assert contents(worker.layer) == before
    if is_cancelled:
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
    journal.go_on.set()
    if not is_cancelled:
        await changing
    assert (contents(worker.layer) == before) == is_cancelled
    assert worker.bench.memory.used == worker.layer.num_bytes
    assert worker.bench.handles.used == len(worker.layer.forwards)


async def test_variables_that_the_journal_refuses_are_not_there() -> None:
    worker, journal = journaled("delayed")
    journal.failure = UnavailableError("the disk is full")
    with pytest.raises(UnavailableError):
        await worker.layer.build(np.dtype(np.float32), (-1, 3))
    assert (worker.layer.variables, worker.bench.memory.used) == (None, 0)
    journal.failure = None
    await worker.layer.build(np.dtype(np.float32), (-1, 3))
    assert worker.layer.variables is not None


@pytest.mark.parametrize("failure", [None, UnavailableError("the disk is full")], ids=["taken", "refused"])
async def test_a_layer_that_is_deleted_while_it_is_built_leaves_nothing(failure: ServiceError | None) -> None:
    journal: ListedJournal[Event] = ListedJournal()
    bench = LayerBench(journal=journal)
    layer = bench.layer(param_initializers={"beta": np.ones(3, np.float32)})
    building = asyncio.ensure_future(layer.build(np.dtype(np.float32), (-1, 3)))
    await journal.hold()
    assert bench.registry.delete(KEY)
    journal.failure = failure
    journal.go_on.set()
    await asyncio.gather(building, return_exceptions=True)
    assert bench.memory.used == 0


async def test_what_cannot_expire_now_expires_later(caplog: pytest.LogCaptureFixture) -> None:
    worker, journal = await prepared("delayed")
    journal.failure = UnavailableError("the disk is full")
    assert await worker.bench.registry.expire() == 0
    assert "did not expire: the disk is full" in caplog.text
    journal.failure = None
    assert await worker.bench.registry.expire() == 1


async def test_two_forwards_that_wait_for_the_journal_count_once() -> None:
    """And so for draws of an adjustment."""
    worker, journal = await prepared("random")
    calls = [asyncio.ensure_future(worker.forward("x")) for _ in range(3)]
    await journal.hold()
    journal.go_on.set()
    first, *others = await asyncio.gather(*calls)
    assert all(other.outputs.tobytes() == first.outputs.tobytes() for other in others)
    assert await worker.layer.run_updates(("x",)) == 1
    assert await worker.layer.run_updates(("x",)) == 0


async def test_what_expires_while_its_update_is_computed_is_not_counted() -> None:
    worker, journal = await prepared("delayed")
    worker.bench.now += 100
    expiring = asyncio.ensure_future(worker.layer.expire())
    await journal.hold()
    updating = asyncio.ensure_future(worker.layer.run_updates(("a",)))
    for _ in range(10):  # until it waits for its turn
        await asyncio.sleep(0)
    journal.go_on.set()
    assert await expiring == 2
    assert await updating == 0
    assert worker.layer.num_updates == 0


async def test_what_is_released_while_its_update_is_computed_is_not_counted() -> None:
    worker, journal = await prepared("delayed")
    releasing = asyncio.ensure_future(worker.layer.release(("a",), with_updates=True))
    await journal.hold()
    updating = asyncio.ensure_future(worker.layer.run_updates(("a",)))
    for _ in range(10):  # until it waits for its turn
        await asyncio.sleep(0)
    journal.go_on.set()
    assert await releasing == 1
    assert await updating == 0
    assert worker.layer.num_updates == 0
