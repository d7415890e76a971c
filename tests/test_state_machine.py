"""Random interleavings of everything an accumulator can be asked, against a model of a few lines."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, PartialShape
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.errors import AbortedError, DeadlineExceededError, InvalidArgumentError
from gradserve_server.resources import ResourceKey
from gradserve_server.tensors.quotas import Quota

KEY = ResourceKey("test", "acc")
SPEC = AccumulatorSpec((ComponentSpec("", np.dtype(np.float64), PartialShape((2,))),))
ITEM_BYTES = 16

values = st.integers(-8, 8)
steps = st.integers(-1, 4)


@dataclass
class Model:
    """What an accumulator is: a step, the values of the round, those who wait, the last average."""

    step: int = 0
    values: list[int] = field(default_factory=list)
    queue: list[tuple[int, "asyncio.Task[Any]"]] = field(default_factory=list)
    last: float | None = None
    served: list[tuple[int, "asyncio.Task[Any]", float, int]] = field(default_factory=list)

    def serve(self) -> None:
        while self.queue and len(self.values) >= self.queue[0][0]:
            self.last = sum(self.values) / len(self.values)
            self.step, self.values = self.step + 1, []
            self.served.append((*self.queue.pop(0), self.last, self.step))


class AccumulatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.memory = Quota(1 << 30, "bytes")
        self.registry = AccumulatorRegistry(
            compute=InlineCompute(),
            allocate=np.empty,
            memory=self.memory,
            limits=LimitsConfig(),
            clock=lambda: 0.0,
            new_incarnation=lambda: "only",
        )
        self.model: Model | None = None
        self.acc: Accumulator | None = None
        self.applied: dict[int, tuple[int, int, bool]] = {}
        self.taken: dict[int, tuple[int, float, int]] = {}
        self.number = 0

    def teardown(self) -> None:
        if self.model is not None:
            self.delete()
        self.loop.close()

    # Steps

    @precondition(lambda self: self.model is None)
    @rule()
    def create(self) -> None:
        self.acc, created = self.run(self.create_now())
        assert created
        self.model, self.applied, self.taken = Model(), {}, {}

    async def create_now(self) -> tuple[Accumulator, bool]:
        return self.registry.create(KEY, SPEC)

    @precondition(lambda self: self.model is not None)
    @rule(value=values, ahead=steps)
    def apply(self, value: int, ahead: int) -> None:
        """Fresh, stale and future gradients."""
        self.number += 1
        stale = ahead < 0
        local_step = self.model.step + ahead
        result, duplicate = self.run(self.send(self.number, value, local_step))
        assert not duplicate
        assert (result.round is None) == stale
        if not stale:
            self.model.values.append(value)
            assert (result.global_step, result.num_accumulated) == (self.model.step, len(self.model.values))
        self.applied[self.number] = (value, local_step, stale)
        self.model.serve()

    @precondition(lambda self: self.model is not None and self.applied)
    @rule(data=st.data())
    def apply_again(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.applied)))
        value, local_step, stale = self.applied[number]
        result, duplicate = self.run(self.send(number, value, local_step))
        assert duplicate
        assert (result.round is None) == stale

    @precondition(lambda self: self.model is not None)
    @rule(ahead=steps)
    def apply_malformed(self, ahead: int) -> None:
        self.number += 1
        bad = lambda: nullcontext(Gradient({"": np.zeros(3)}))  # noqa: E731
        call = RequestId("client", self.number)
        self.fails(InvalidArgumentError, self.acc.apply(call, Contribution(self.model.step + ahead), bad))

    @precondition(lambda self: self.model is not None)
    @rule(num_required=st.integers(1, 4))
    def take(self, num_required: int) -> None:
        self.number += 1
        task = self.loop.create_task(self.acc.take(RequestId("client", self.number), num_required, None))
        task.set_name(str(self.number))
        self.model.queue.append((num_required, task))
        self.model.serve()
        self.settle()

    @precondition(lambda self: self.model is not None)
    @rule(num_required=st.integers(-2, 0))
    def take_none(self, num_required: int) -> None:
        self.fails(InvalidArgumentError, self.acc.take(None, num_required, None))

    @precondition(lambda self: self.model is not None and self.taken)
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.taken)))
        num_required, mean, order = self.taken[number]
        again = self.acc.take(RequestId("client", number), num_required, None)
        if order == len(self.taken):
            average, duplicate = self.run(again)
            assert duplicate
            np.testing.assert_array_equal(average.values[""], [mean, mean])
        else:
            self.fails(AbortedError, again)

    @precondition(lambda self: self.model is not None and self.model.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.model.queue) - 1))
        _, task = self.model.queue.pop(position)
        task.cancel()
        self.model.serve()
        self.settle()
        assert task.cancelled()

    @precondition(lambda self: self.model is not None and len(self.model.values) == 0)
    @rule()
    def deadline(self) -> None:
        self.fails(DeadlineExceededError, self.acc.take(None, 1, 0.0))

    @precondition(lambda self: self.model is not None)
    @rule(step=st.integers(-2, 6))
    def set_global_step(self, step: int) -> None:
        self.run(self.acc.set_global_step(step))
        self.model.step = step

    @precondition(lambda self: self.model is not None)
    @rule()
    def delete(self) -> None:
        async def delete_now() -> bool:
            return self.registry.delete(KEY)

        assert self.run(delete_now())
        for _, task in self.model.queue:
            assert isinstance(task.exception(), AbortedError)
        self.check_served()
        self.model = self.acc = None

    # After each

    @invariant()
    def agrees(self) -> None:
        if self.model is None:
            assert self.memory.used == 0
            assert self.registry.waiters.used == 0
            return
        self.check_served()
        state = self.acc.state
        assert state.global_step == self.model.step
        assert state.num_accumulated == len(self.model.values)
        assert state.num_waiting == len(self.model.queue) == self.registry.waiters.used
        held = bool(self.model.values) + (self.model.last is not None)
        assert state.num_bytes == self.memory.used == held * ITEM_BYTES
        assert not any(task.done() for _, task in self.model.queue)

    def check_served(self) -> None:
        for num_required, task, mean, step in self.model.served:
            average, duplicate = task.result()
            assert not duplicate
            np.testing.assert_array_equal(average.values[""], [mean, mean])
            assert average.step == step
            self.taken[int(task.get_name())] = (num_required, mean, len(self.taken) + 1)
        self.model.served.clear()

    def send(self, number: int, value: int, local_step: int) -> Any:
        gradient = Gradient({"": np.array([value, value], np.float64)})
        return self.acc.apply(RequestId("client", number), Contribution(local_step), lambda: nullcontext(gradient))

    def run(self, call: Any) -> Any:
        result = self.loop.run_until_complete(call)
        self.settle()
        return result

    def fails(self, error: type[Exception], call: Any) -> None:
        try:
            self.loop.run_until_complete(call)
        except error:
            self.settle()
        else:
            raise AssertionError(f"expected {error.__name__}")

    def settle(self) -> None:
        """Lets every task that can go on do so."""

        async def turns() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())


AccumulatorMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAccumulatorMachine = AccumulatorMachine.TestCase
