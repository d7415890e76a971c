"""Random interleavings of everything an accumulator can be asked, against a model of a few lines."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.accumulators.ledger import Event, Ledger
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.records import EVENTS
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.rounds import Applied, Outcome
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, PartialShape
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import AbortedError, DeadlineExceededError, InvalidArgumentError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import Identity, ShareRules
from gradserve_server.storage.journal import Record
from tests.accumulators.bench import opened
from tests.journals import EventJournal, OneJournal

KEY = ResourceKey("test", "acc", Identity("chief"))
SPEC = AccumulatorSpec((ComponentSpec("", np.dtype(np.float64), PartialShape((2,))),))
ITEM_BYTES = 16

values = st.integers(-8, 8)
steps = st.integers(-1, 4)
needs = st.integers(1, 4)
workers = st.sampled_from(["", "w0", "w1", "w2"])


@dataclass(frozen=True)
class Pull:
    """What a push_pull says."""

    value: int
    local_step: int
    worker: str
    num_required: int


@dataclass
class Waiting:
    """A call that waits: a take, or a push_pull whose worker is in a round."""

    number: int
    num_required: int
    task: "asyncio.Task[Any]"
    pull: Pull | None = None
    round: int | None = None


@dataclass
class Model:
    """What an accumulator is, and what it has promised to remember.

    Attributes:
        expecting: Push_pulls, by number, that the current round answers, whether they wait or gave up.
        ended: What the calls that a round has answered were told: mean, step and round.
        steps: The steps that rounds led to, without those that were abandoned when the step was set back.
        kept_for: Of those, the ones whose average is kept because they may not have received it: the rounds.
        latest: The latest round that has an average.
        dropped: Push_pulls, by number, whose round was dropped.
    """

    step: int = 0
    values: list[int] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)
    round: int = 0
    queue: list[Waiting] = field(default_factory=list)
    served: list[Waiting] = field(default_factory=list)
    expecting: set[int] = field(default_factory=set)
    ended: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    kept_for: dict[int, int] = field(default_factory=dict)
    latest: int = -1
    dropped: set[int] = field(default_factory=set)

    def serve(self) -> None:
        while self.queue and len(self.values) >= self.queue[0].num_required:
            head = self.queue[0]
            answered = [each for each in self.queue if each is head or each.round == self.round]
            mean = sum(self.values) / len(self.values)
            self.step += 1
            self.steps[self.round] = self.step
            for number in {head.number, *self.expecting}:
                self.ended[number] = (mean, self.step, self.round)
                self.kept_for[number] = self.round
            self.queue = [each for each in self.queue if each not in answered]
            self.served += answered
            self.latest = self.round
            self.begin_round()

    def begin_round(self) -> None:
        self.values, self.workers, self.expecting = [], set(), set()
        self.round += 1

    def drop_round(self) -> list[Waiting]:
        """Returns the calls that waited for its average."""
        waited = [each for each in self.queue if each.round == self.round]
        self.queue = [each for each in self.queue if each not in waited]
        self.dropped |= self.expecting | {each.number for each in waited}
        self.begin_round()
        return waited

    def heard_of(self, number: int, unanswered: set[int]) -> None:
        """A call arrives that says which earlier ones were answered."""
        for earlier in [each for each in {*self.kept_for, *self.expecting} if each < number and each not in unanswered]:
            self.kept_for.pop(earlier, None)
            self.expecting.discard(earlier)

    @property
    def kept_rounds(self) -> set[int]:
        return ({self.latest} | set(self.kept_for.values())) & self.steps.keys()

    def set_step(self, step: int) -> None:
        if step < self.step:
            self.steps = {number: led_to for number, led_to in self.steps.items() if led_to <= step}
        self.step = step


class Recorder(EventJournal[Event]):
    """Lists the records of events."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    async def append(self, event: Event) -> None:
        self._records.append(json.loads(json.dumps(EVENTS.record(event))))


class AccumulatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.memory = Budget(1 << 30, "bytes", ShareRules())
        self.bookkeeping = Budget(1 << 30, "bytes", ShareRules())
        self.records: list[Record] = []
        lifetimes = Lifetimes(lambda: 0.0, 60.0)
        factory = AccumulatorFactory(
            places=Places(HostPlace("cpu", Reducer(ForkJoin(1)), np.empty, InlineCompute(), self.memory)),
            bookkeeping=self.bookkeeping,
            limits=LimitsConfig(),
            lifetimes=lifetimes,
        )
        self.registry = AccumulatorRegistry(
            factory,
            lifetimes,
            new_incarnation=lambda: "only",
            journals=cast(AccumulatorJournals, OneJournal(Recorder(self.records))),
        )
        self._model: Model | None = None
        self._acc: Accumulator | None = None
        self.applied: dict[int, tuple[int, int, bool]] = {}
        self.takes: dict[int, int] = {}
        self.pulls: dict[int, Pull] = {}
        self.lost: set[int] = set()
        """Calls whose reply the client did not get, and will ask for again."""
        self.number = 0

    @property
    def exists(self) -> bool:
        """Whether there is an accumulator, and its model."""
        return self._model is not None

    @property
    def model(self) -> Model:
        assert self._model is not None
        return self._model

    @property
    def acc(self) -> Accumulator:
        assert self._acc is not None
        return self._acc

    def teardown(self) -> None:
        if self.exists:
            self.delete()
        self.loop.close()

    # Steps

    @precondition(lambda self: not self.exists)
    @rule()
    def create(self) -> None:
        self._acc, created = self.run(self.create_now())
        assert created
        self._model = Model()
        self.records.clear()
        self.applied, self.takes, self.pulls, self.lost = {}, {}, {}, set()

    async def create_now(self) -> tuple[Accumulator, bool]:
        return self.registry.create(KEY, SPEC)

    @precondition(lambda self: self.exists)
    @rule(value=values, ahead=steps)
    def apply(self, value: int, ahead: int) -> None:
        """Fresh, stale and future gradients."""
        self.number += 1
        stale = ahead < 0
        local_step = self.model.step + ahead
        result, duplicate = self.run(self.send(self.number, value, local_step))
        assert not duplicate
        assert result.outcome is (Outcome.STALE if stale else Outcome.ACCEPTED)
        if not stale:
            self.model.values.append(value)
            assert (result.global_step, result.num_accumulated) == (self.model.step, len(self.model.values))
        self.applied[self.number] = (value, local_step, stale)
        self.model.serve()

    @precondition(lambda self: self.exists and self.applied)
    @rule(data=st.data(), same_turn=st.booleans())
    def apply_again(self, data: st.DataObject, same_turn: bool) -> None:
        """Once more, or twice in the same turn of the loop."""
        number = data.draw(st.sampled_from(sorted(self.applied)))
        value, local_step, stale = self.applied[number]
        again = [self.loop.create_task(self.send(number, value, local_step)) for _ in range(1 + same_turn)]
        if same_turn:
            again[0].cancel()
        self.settle()
        result, duplicate = again[-1].result()
        assert duplicate
        assert (result.outcome is Outcome.STALE) == stale

    @precondition(lambda self: self.exists)
    @rule(value=values)
    def apply_cancelled_and_sent_again(self, value: int) -> None:
        """Whether the first had begun or not, it counts once."""
        self.number += 1
        first = self.loop.create_task(self.send(self.number, value, self.model.step))
        self.loop.run_until_complete(asyncio.sleep(0))
        first.cancel()
        self.run(self.send(self.number, value, self.model.step))
        self.applied[self.number] = (value, self.model.step, False)
        self.model.values.append(value)
        self.model.serve()

    @precondition(lambda self: self.exists)
    @rule(ahead=steps)
    def apply_malformed(self, ahead: int) -> None:
        self.number += 1
        bad = opened(Gradient({"": np.zeros(3)}))
        self.fails(
            InvalidArgumentError, self.acc.apply(self.id(self.number), Contribution(self.model.step + ahead), bad)
        )

    @precondition(lambda self: self.exists)
    @rule(num_required=needs)
    def take(self, num_required: int) -> None:
        self.number += 1
        self.takes[self.number] = num_required
        self.model.queue.append(Waiting(self.number, num_required, self.start_take(self.number)))
        self.model.serve()
        self.settle()

    @precondition(lambda self: self.exists)
    @rule(num_required=st.integers(-2, 0))
    def take_none(self, num_required: int) -> None:
        self.fails(InvalidArgumentError, self.acc.take(None, num_required, None))

    @precondition(lambda self: self.exists)
    @rule(value=values, ahead=steps, worker=workers, num_required=needs)
    def push_pull(self, value: int, ahead: int, worker: str, num_required: int) -> None:
        self.number += 1
        pull = Pull(value, self.model.step + ahead, worker, num_required)
        task = self.start_pull(self.number, pull)
        if ahead < 0:
            self.settle()
            assert task.result()[0].outcome is Outcome.STALE
            return
        self.pulls[self.number] = pull
        if not worker or worker not in self.model.workers:
            self.model.values.append(value)
            self.model.workers |= {worker} - {""}
        self.model.expecting.add(self.number)
        self.model.queue.append(Waiting(self.number, num_required, task, pull, self.model.round))
        self.model.serve()
        self.settle()

    @precondition(lambda self: self.exists and self.model.queue)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A take is as if it had never been; the gradient of a push_pull stays, and it may ask again."""
        waiting = self.model.queue.pop(data.draw(st.integers(0, len(self.model.queue) - 1)))
        waiting.task.cancel()
        if waiting.pull is not None:
            self.lost.add(waiting.number)
        else:
            del self.takes[waiting.number]
            self.lost.discard(waiting.number)
        self.model.serve()
        self.settle()
        assert waiting.task.cancelled()

    @precondition(lambda self: self.exists and self.model.queue)
    @rule(data=st.data())
    def cancel_and_send_again_in_the_same_turn(self, data: st.DataObject) -> None:
        waiting = self.model.queue.pop(data.draw(st.integers(0, len(self.model.queue) - 1)))
        waiting.task.cancel()
        self.model.queue.append(self.again(waiting))
        self.model.serve()
        self.settle()
        assert waiting.task.cancelled()

    @precondition(lambda self: self.exists and self.lost - self.waiting())
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The reply was lost, or the call gave up: it gets the average of its round, or waits for it."""
        number = data.draw(st.sampled_from(sorted(self.lost - self.waiting())))
        self.lost.remove(number)
        pull = self.pulls.get(number)
        task = self.start_take(number) if pull is None else self.start_pull(number, pull)
        self.settle()
        if number in self.model.ended:
            self.check_answer_again(number, task)
        elif number in self.model.dropped:
            applied, _, duplicate = task.result()
            assert (applied.outcome, duplicate) == (Outcome.STALE, True)
        else:
            assert pull is not None
            self.model.queue.append(Waiting(number, pull.num_required, task, pull, self.model.round))
            self.model.serve()
            self.settle()

    @precondition(lambda self: self.exists and self.model.ended)
    @rule(data=st.data())
    def ask_again_after_the_answer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.ended)))
        if number in self.lost:
            return
        pull = self.pulls.get(number)
        task = self.start_take(number) if pull is None else self.start_pull(number, pull)
        self.settle()
        self.check_answer_again(number, task)

    @precondition(lambda self: self.exists and len(self.model.values) == 0)
    @rule()
    def deadline(self) -> None:
        self.fails(DeadlineExceededError, self.acc.take(None, 1, 0.0))

    @precondition(lambda self: self.exists)
    @rule(step=st.integers(-2, 6), drops=st.booleans())
    def set_global_step(self, step: int, drops: bool) -> None:
        self.run(self.acc.set_global_step(step, drop_gradients=drops))
        dropped = self.model.drop_round() if drops and step != self.model.step and self.model.values else []
        self.model.set_step(step)
        self.settle()
        assert all(each.task.result()[0].outcome is Outcome.STALE for each in dropped)

    @precondition(lambda self: self.exists)
    @rule(data=st.data())
    def lose_replies(self, data: st.DataObject) -> None:
        """The network keeps the answers of some calls that still wait."""
        self.lost |= set(data.draw(st.lists(st.sampled_from([each.number for each in self.model.queue] or [0])))) - {0}

    @precondition(lambda self: self.exists)
    @rule()
    def delete(self) -> None:
        async def delete_now() -> bool:
            return self.registry.delete(KEY)

        assert self.run(delete_now())
        for waiting in self.model.queue:
            assert isinstance(waiting.task.exception(), AbortedError)
        self.check_served()
        self._model = self._acc = None

    # After each

    @invariant()
    def the_same_events_give_the_same_ledger(self) -> None:
        if not self.exists:
            return
        replayed = Ledger(
            CallMemory(
                window=1024,
                max_clients=1,
                silence=1.0,
                clock=lambda: 0.0,
                bookkeeping=Budget(1 << 40, "bytes").reserve(),
            )
        )
        for record in self.records:
            replayed.replay(EVENTS.event(record))
        rounds, state = replayed.rounds, self.acc.state
        assert rounds.global_step == state.global_step
        assert rounds.num_accumulated == state.num_accumulated
        assert tuple(rounds.members.workers) == state.worker_ids
        assert replayed.awaiting == self.acc._ledger.awaiting
        for number, (value, local_step, stale) in self.applied.items():
            answer = replayed.calls.recall(RequestId("client", number))
            assert isinstance(answer, Applied), (value, local_step)
            assert (answer.outcome is Outcome.STALE) == stale
        for number, (_, step, round_number) in self.model.ended.items():
            answer = replayed.calls.recall(RequestId("client", number))
            assert answer is not None
            assert answer.round is not None
            assert (answer.round.step, answer.round.number) == (step, round_number)

    @invariant()
    def everything_counts_for_its_creator_and_container(self) -> None:
        for budget in (self.memory, self.registry.factory.count):
            assert budget.held_by("chief") == budget.held_in("test") == budget.used
        for budget in (self.bookkeeping, self.registry.factory.waiters):
            assert budget.held_in("test") == budget.used
        if not self.registry.factory.waiters.used:
            # That of waits counts for their container alone.
            assert self.bookkeeping.held_by("chief") == self.bookkeeping.used

    @invariant()
    def agrees(self) -> None:
        if not self.exists:
            assert self.memory.used == self.bookkeeping.used == 0
            assert self.registry.factory.waiters.used == 0
            return
        self.check_served()
        state = self.acc.state
        assert state.global_step == self.model.step
        assert state.num_accumulated == len(self.model.values)
        assert set(state.worker_ids) == self.model.workers
        assert state.num_waiting == len(self.model.queue) == self.registry.factory.waiters.used
        held = bool(self.model.values) + len(self.model.kept_rounds)
        assert state.num_bytes == self.memory.used == held * ITEM_BYTES
        assert not any(waiting.task.done() for waiting in self.model.queue)

    def check_answer_again(self, number: int, task: "asyncio.Task[Any]") -> None:
        if self.model.ended[number][2] in self.model.kept_rounds:
            self.check_answer(number, task, duplicate=True)
        else:
            assert isinstance(task.exception(), AbortedError)

    def check_served(self) -> None:
        for waiting in self.model.served:
            self.check_answer(waiting.number, waiting.task)
        self.model.served.clear()

    def check_answer(self, number: int, task: "asyncio.Task[Any]", duplicate: bool | None = None) -> None:
        *_, average, was_duplicate = task.result()
        mean, step, _ = self.model.ended[number]
        np.testing.assert_array_equal(average.values[""], [mean, mean])
        assert average.step == step
        assert duplicate in (None, was_duplicate)

    # Calls

    def waiting(self) -> set[int]:
        return {waiting.number for waiting in self.model.queue}

    def id(self, number: int) -> RequestId:
        unanswered = {each for each in self.lost | self.waiting() if each < number}
        self.model.heard_of(number, unanswered)
        return RequestId("client", number, unanswered=frozenset(unanswered))

    def start_take(self, number: int) -> "asyncio.Task[Any]":
        return self.loop.create_task(self.acc.take(self.id(number), self.takes[number], None))

    def start_pull(self, number: int, pull: Pull) -> "asyncio.Task[Any]":
        contribution = Contribution(pull.local_step, worker_id=pull.worker)
        call = self.acc.push_pull(self.id(number), contribution, gradient(pull.value), pull.num_required, None)
        return self.loop.create_task(call)

    def again(self, waiting: Waiting) -> Waiting:
        pull = waiting.pull
        task = self.start_take(waiting.number) if pull is None else self.start_pull(waiting.number, pull)
        return Waiting(waiting.number, waiting.num_required, task, pull, waiting.round)

    def send(self, number: int, value: int, local_step: int) -> Any:
        return self.acc.apply(self.id(number), Contribution(local_step), gradient(value))

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


def gradient(value: int) -> Any:
    return opened(Gradient({"": np.array([value, value], np.float64)}))


AccumulatorMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAccumulatorMachine = AccumulatorMachine.TestCase
