"""Calls of a layer that overlap, fail, or are given up: what is counted and what is held stays exact."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import AbortedError, ResourceExhaustedError
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.resources.registry import ResourceKey
from tests.journals import ListedJournal
from tests.layers.bench import KEY, LayerBench, contents

X = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2
DY = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
VARIABLES_BYTES = 3 * 3 * 4
FORWARD, BACKWARD, UPDATE = (f"BatchNormLayer.{kind}" for kind in ("Forward", "Backward", "Update"))
IN_PLACE: dict[str, Any] = {"updates_collections": None}
DELAYED: dict[str, Any] = {}


class Gate:
    """Stops the computations of a bench before they begin, until they are let through.

    Attributes:
        closed: The kinds that are stopped.
        failing: The kinds that fail for want of memory instead.
        stopped: All that were stopped, and what lets each through.
        arrivals: What lets each through, to wait for.
    """

    def __init__(self, bench: LayerBench) -> None:
        self.closed: set[str] = set()
        self.failing: set[str] = set()
        self.stopped: list[tuple[str, asyncio.Event]] = []
        self.arrivals: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self._run = bench.runner.run
        bench.runner.run = self.run  # type: ignore[method-assign]

    async def run(self, call: Any, *, on_host: Any, host_bytes: int = 0, room: Any = None) -> Any:
        kind = call.op.name
        await asyncio.sleep(0)
        if kind in self.closed:
            event = asyncio.Event()
            self.stopped.append((kind, event))
            self.arrivals.put_nowait(event)
            await event.wait()
        if kind in self.failing:
            raise MemoryError
        computed = await self._run(call, on_host=on_host, host_bytes=host_bytes, room=room)
        await asyncio.sleep(0)
        return computed

    def open(self) -> None:
        """Lets through whatever is stopped."""
        self.closed.clear()
        for _, event in self.stopped:
            event.set()


@pytest.fixture
def bench() -> Iterator[LayerBench]:
    made = LayerBench()
    yield made
    made.registry.delete(KEY)
    assert (made.memory.used, made.handles.used) == (0, 0)


@pytest.fixture
def gate(bench: LayerBench) -> Gate:
    return Gate(bench)


def forward(layer: BatchNormLayer, forward_id: str = "", x: Any = X, **call: Any) -> Awaitable[ForwardResult]:
    return layer.forward(CallInputs(x), ForwardCall(forward_id=forward_id, **call), on_host=True)


async def backward(layer: BatchNormLayer, forward_id: str, *, retain: bool = False) -> Any:
    return await layer.backward(layer.check_backward(forward_id, DY), retain=retain, on_host=True)


async def settle() -> None:
    """Lets every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def started(call: Any) -> Any:
    task = asyncio.ensure_future(call)
    await settle()
    return task


class TestDuplicates:
    @pytest.mark.parametrize("stop", [FORWARD, UPDATE])
    @pytest.mark.parametrize("saves", [True, False], ids=["kept", "not kept"])
    async def test_in_place(self, bench: LayerBench, gate: Gate, stop: str, saves: bool) -> None:
        layer = bench.layer(**IN_PLACE)
        gate.closed = {stop}
        calls = [await started(forward(layer, "a", keep_for_backward=saves)) for _ in range(3)]
        # None is answered before the averages have followed.
        assert not any(call.done() for call in calls)
        gate.open()
        await asyncio.gather(*calls)
        assert layer.num_updates == 1
        assert len(layer.forwards) == saves

    async def test_in_place_when_the_first_fails(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer(**IN_PLACE)
        gate.closed, gate.failing = {UPDATE}, {UPDATE}
        first = await started(forward(layer, "a"))
        second = await started(forward(layer, "a"))
        gate.closed.clear()
        gate.stopped[0][1].set()
        with pytest.raises(MemoryError):
            await first
        gate.failing.clear()
        await second
        assert layer.num_updates == 1
        await backward(layer, "a")

    async def test_in_place_when_the_first_is_cancelled(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer(**IN_PLACE)
        gate.closed = {UPDATE}
        first = await started(forward(layer, "a"))
        second = await started(forward(layer, "a"))
        first.cancel()
        gate.open()
        await second
        assert layer.num_updates == 1
        await backward(layer, "a")

    async def test_delayed(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer(**DELAYED)
        gate.closed = {FORWARD}
        calls = [await started(forward(layer, "a")) for _ in range(3)]
        gate.open()
        assert all(made.has_pending_updates for made in await asyncio.gather(*calls))
        assert await layer.run_updates(()) == 1
        assert await layer.run_updates(()) == 0

    @pytest.mark.parametrize("names", [(), ("a", "b")], ids=["all", "named"])
    async def test_of_what_is_being_updated(self, bench: LayerBench, gate: Gate, names: Any) -> None:
        """The call comes again when the updates of the first are half run, or about to be."""
        layer = bench.layer(**DELAYED)
        await asyncio.gather(forward(layer, "a"), forward(layer, "b"))
        gate.closed = {UPDATE}
        updates = await started(layer.run_updates(names))
        await asyncio.gather(forward(layer, "a"), forward(layer, "b"))
        gate.open()
        assert await updates == 2
        assert await layer.run_updates(()) == 0
        assert layer.num_updates == 2

    async def test_of_what_is_being_gone_back_from(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer(**IN_PLACE)
        await forward(layer, "a")
        gate.closed = {BACKWARD}
        first = await started(backward(layer, "a"))
        with pytest.raises(AbortedError):
            await backward(layer, "a")
        await forward(layer, "a")
        gate.open()
        await first
        # The repeated forward saved anew: for another backward.
        await backward(layer, "a")
        with pytest.raises(AbortedError):
            await backward(layer, "a")


class TestOverlaps:
    async def test_updates_wait_for_each_other(self, bench: LayerBench, gate: Gate) -> None:
        """In place, delayed and set: none is lost."""
        layer = bench.layer(**IN_PLACE, decay=0.5)
        await forward(layer)
        gate.closed = {UPDATE}
        calls = [await started(forward(layer)) for _ in range(4)]
        calls.append(await started(layer.set_variables({"moving_mean": np.full(3, 64, np.float32)})))
        calls += [await started(forward(layer, x=np.zeros_like(X))) for _ in range(2)]
        for _ in range(6):
            (await gate.arrivals.get()).set()
        await asyncio.gather(*calls)
        assert layer.num_updates == 7
        np.testing.assert_array_equal(layer.get_variables(["moving_mean"])["moving_mean"], [16.0] * 3)

    async def test_a_forward_has_the_variables_of_its_beginning(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer()
        await forward(layer)
        gate.closed = {FORWARD}
        begun = await started(forward(layer, is_training=False))
        await layer.set_variables({"beta": np.full(3, 5, np.float32), "moving_mean": np.full(3, 9, np.float32)})
        gate.open()
        np.testing.assert_allclose((await begun).outputs, X / np.sqrt(1.001), rtol=1e-6)

    async def test_release_while_updates_are_run(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer()
        await asyncio.gather(forward(layer, "a"), forward(layer, "b"))
        gate.closed = {UPDATE}
        updates = await started(layer.run_updates(()))
        assert await layer.release(["a", "b"], with_updates=True) == 2
        gate.open()
        # That of "a" had begun, but not taken effect when the release was answered.
        assert await updates == layer.num_updates == 0

    async def test_release_just_before_updates_are_run(self, bench: LayerBench) -> None:
        layer = bench.layer()
        await forward(layer, "a")
        updates = asyncio.ensure_future(layer.run_updates(()))
        await asyncio.sleep(0)
        await layer.release(["a"], with_updates=True)
        assert await updates == layer.num_updates == 0

    async def test_release_during_a_backward_that_fails(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer()
        await forward(layer, "a")
        gate.closed, gate.failing = {BACKWARD}, {BACKWARD}
        going_back = await started(backward(layer, "a"))
        await layer.release(["a"], with_updates=False)
        gate.open()
        with pytest.raises(MemoryError):
            await going_back
        with pytest.raises(AbortedError):
            await backward(layer, "a")
        assert bench.memory.used == layer.num_bytes == VARIABLES_BYTES + 2 * 3 * 4

    @pytest.mark.parametrize("stop", [FORWARD, UPDATE, BACKWARD])
    @pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED], ids=["in place", "delayed"])
    async def test_a_layer_is_deleted_under_calls(
        self, bench: LayerBench, gate: Gate, stop: str, arguments: dict[str, Any]
    ) -> None:
        """They end as if it were still there, and what they held is given back."""
        layer = bench.layer(**arguments)
        await asyncio.gather(forward(layer, "a"), forward(layer, "b"))
        gate.closed = {stop}
        calls = [
            await started(call) for call in (forward(layer, "c"), backward(layer, "a"), layer.run_updates(("a", "b")))
        ]
        assert bench.registry.delete(KEY)
        gate.open()
        await asyncio.gather(*calls)
        assert (bench.memory.used, bench.handles.used, len(layer.forwards)) == (0, 0, 0)
        # Not even a forward of a client that still has it leaves anything.
        await forward(layer, "d")
        assert (bench.memory.used, bench.handles.used) == (0, 0)

    async def test_a_layer_is_deleted_before_its_first_forward_began(self, bench: LayerBench) -> None:
        layer = bench.layer()
        assert bench.registry.delete(KEY)
        with pytest.raises(AbortedError, match="was deleted"):
            await forward(layer)


class TestFailures:
    async def test_of_an_update_in_place(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer(**IN_PLACE)
        await forward(layer, "first")
        before, held = layer.variables, bench.memory.used
        gate.failing = {UPDATE}
        for _ in range(3):
            with pytest.raises(MemoryError):
                await forward(layer, "a")
        assert (layer.variables, bench.memory.used, len(layer.forwards)) == (before, held, 1)
        gate.failing.clear()
        await forward(layer, "a")
        assert layer.num_updates == 2

    async def test_of_delayed_updates(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer()
        await asyncio.gather(*(forward(layer, name) for name in "abc"))
        gate.failing = {UPDATE}
        with pytest.raises(MemoryError):
            await layer.run_updates(())
        gate.failing.clear()
        assert await layer.run_updates(()) == 3

    async def test_of_a_backward(self, bench: LayerBench, gate: Gate) -> None:
        layer = bench.layer()
        await forward(layer, "a")
        held = bench.memory.used
        gate.failing = {BACKWARD}
        for retain in (False, True):
            with pytest.raises(MemoryError):
                await backward(layer, "a", retain=retain)
            assert bench.memory.used == held
        gate.failing.clear()
        await backward(layer, "a")

    async def test_of_what_delivers_the_outputs(self, bench: LayerBench) -> None:
        async def refuse(_: Any) -> None:
            raise ResourceExhaustedError("no room")

        layer = bench.layer(**IN_PLACE)
        await forward(layer, "first")
        held = bench.memory.used
        with pytest.raises(ResourceExhaustedError):
            await layer.forward(CallInputs(X), ForwardCall(forward_id="a"), on_host=True, deliver=refuse)
        with pytest.raises(ResourceExhaustedError):
            await layer.backward(layer.check_backward("first", DY), retain=False, on_host=True, deliver=refuse)
        assert (layer.num_updates, bench.memory.used) == (1, held)
        await forward(layer, "a")
        await backward(layer, "first")
        assert layer.num_updates == 2


Operation = Callable[[BatchNormLayer], Awaitable[Any]]
OPERATIONS: dict[str, Operation] = {
    "forward": lambda layer: forward(layer, "new"),
    "forward again": lambda layer: forward(layer, "a"),
    "backward": lambda layer: backward(layer, "a"),
    "run_updates": lambda layer: layer.run_updates(()),
    "set_variables": lambda layer: layer.set_variables({"beta": np.ones(3, np.float32)}),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
@pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED], ids=["in place", "delayed"])
@pytest.mark.parametrize("is_first", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("journal_turns", [0, 2], ids=["journaled at once", "journaled slowly"])
async def test_a_call_can_be_cancelled_anywhere(
    arguments: dict[str, Any], operation: Operation, is_first: bool, journal_turns: int
) -> None:
    """The k-th time that it waits, for every k: it was carried out or it was not, and nothing is left of it."""
    for turns in range(100):
        journal: ListedJournal[Event] = ListedJournal(journal_turns)
        bench = LayerBench(journal=journal)
        Gate(bench)
        layer = bench.layer(**arguments)
        if not is_first:
            await asyncio.gather(forward(layer, "a"), forward(layer, "b"))
            blocking = asyncio.ensure_future(layer.run_updates(()))
        elif operation not in (OPERATIONS["forward"], OPERATIONS["forward again"]):
            await forward(layer, "a")
        call = asyncio.ensure_future(operation(layer))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        outcomes: list[object] = await asyncio.gather(call, return_exceptions=True)
        if not is_first:
            await blocking
        assert bench.memory.used == layer.num_bytes
        assert bench.handles.used == len(layer.forwards)
        assert not layer._changing.locked()
        replayed = LayerBench().layer(**arguments)
        for event in journal.events:
            replayed.replay(event)
        assert contents(replayed) == contents(layer)
        # Whatever happened, all of it can be done now, each forward once.
        await asyncio.gather(*(forward(layer, name) for name in ("a", "b", "new")))
        await layer.run_updates(())
        assert layer.num_updates == 3
        for name in ("a", "b", "new"):
            await backward(layer, name)
        assert bench.memory.used == layer.num_bytes == VARIABLES_BYTES
        if not isinstance(outcomes[0], asyncio.CancelledError):
            return
    raise AssertionError("it never ended")


class TestBudgets:
    @pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED], ids=["in place", "delayed"])
    async def test_handles(self, bench: LayerBench, arguments: dict[str, Any]) -> None:
        layer = bench.layer(**arguments)
        await forward(layer, "a")
        bench.handles.limit = 1
        before, held = layer.num_updates, bench.memory.used
        with pytest.raises(ResourceExhaustedError, match="too many tensor handles"):
            await forward(layer, "b")
        assert (layer.num_updates, bench.memory.used, bench.handles.used) == (before, held, 1)
        await forward(layer, "c", is_training=False)

    @pytest.mark.parametrize("arguments", [IN_PLACE, DELAYED], ids=["in place", "delayed"])
    async def test_bytes(self, arguments: dict[str, Any]) -> None:
        """Whatever the limit is, a call is carried out as a whole or not at all."""
        refused = 0
        for limit in range(0, 4000, 4):
            bench = LayerBench(limit)
            layer = bench.layer(**arguments)
            try:
                await forward(layer, "a")
            except ResourceExhaustedError:
                refused += 1
                assert layer.num_updates == len(layer.forwards) == bench.handles.used == 0
                assert bench.memory.used == (0 if layer.variables is None else VARIABLES_BYTES)
                continue
            assert refused == limit // 4
            held = bench.memory.used
            assert VARIABLES_BYTES + X.nbytes < held <= limit
            with pytest.raises(ResourceExhaustedError, match="too many bytes of tensor memory"):
                await asyncio.gather(*(forward(layer, str(number)) for number in range(100)))
            await layer.release(["a", *map(str, range(100))], with_updates=True)
            assert bench.memory.used == VARIABLES_BYTES
            return
        raise AssertionError("no limit was enough")

    def test_layers(self) -> None:
        bench = LayerBench(max_layers=2)
        for name in ("a", "b"):
            bench.layer(ResourceKey("test", name))
        with pytest.raises(ResourceExhaustedError, match="too many layers: 1 asked for, 2 in use, 2 allowed"):
            bench.layer(ResourceKey("test", "c"))
        assert bench.layer(ResourceKey("test", "b")) is bench.layer(ResourceKey("test", "b"))
        assert bench.registry.delete(ResourceKey("test", "a"))
        bench.layer(ResourceKey("test", "c"))
