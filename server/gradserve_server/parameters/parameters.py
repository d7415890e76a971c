"""One server's parameters: orders the calls on them, and answers them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from gradserve_protocol.arrays import DoesNotFitError
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.changes import RoundChanges
from gradserve_server.accumulators.gradient import Array, Average, Contribution, Gradient, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import Taken
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import Pushed, Rounds, Wording
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError, ServiceError
from gradserve_server.limits import listed, quoted
from gradserve_server.parameters.journal import ParametersJournal
from gradserve_server.parameters.ledger import RulesChanged, UpdateLedger, VersionLoaded, WeightLedger
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.optimizers.schedule import Schedule
from gradserve_server.parameters.queue import UpdateQueue
from gradserve_server.parameters.record import RoundRecord, RoundRecords
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.update_sum import HeldUpdates, RunningUpdates
from gradserve_server.parameters.variables import Loaded, OptimizerState, Variables
from gradserve_server.parameters.versions import Version, Versions, version_of
from gradserve_server.resources.budget import Reservation
from gradserve_server.storage.journal import Durability

WORDING = Wording("parameters", "update", "version")
"""The words of messages that parameters share with accumulators."""


@dataclass(frozen=True)
class Changes:
    """Changes of the rules, or of the values.

    Attributes:
        optimizer: The next optimizer; None for the present one. Likewise the others.
        schedule: The next schedule.
        rounds: The next rules for the end of a round.
        loaded: Values to go on with.
        step: Their step, if it is ahead of the present one; otherwise they become the next step.
    """

    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    rounds: RoundRules | None = None
    loaded: Loaded | None = None
    step: int | None = None

    def applied_to(self, rules: Rules) -> Rules:
        """Returns the rules with these changes."""
        return Rules(self.optimizer or rules.optimizer, self.rounds or rules.rounds, self.schedule or rules.schedule)


@dataclass(frozen=True)
class ParametersState:
    """The state of parameters at one moment; see ParametersInfo in the protos."""

    step: int
    digest: bytes
    num_updates: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
    weights: WeightLedger
    num_required: int


@dataclass(frozen=True)
class Machine:
    """The parts of which parameters are made.

    Attributes:
        changes: Makes the changes of their rounds, one at a time.
        ledger: Decides which updates count, and when a round ends.
        queue: Holds the waiting calls.
        variables: The masters and the state of the optimizer.
        records: Keeps the records of rounds.
        journal: Takes every change; None if nothing is durable.
        memory: An empty reservation of bytes for them.
        waiters: The budget of waiting calls.
    """

    changes: RoundChanges
    ledger: UpdateLedger
    queue: UpdateQueue
    variables: Variables
    records: RoundRecords
    journal: ParametersJournal | None
    memory: Reservation
    waiters: Reservation


class Parameters:
    """A model's parameters, which change in rounds. `ParameterService` in the protos defines the semantics.

    They are an accumulator whose rounds end by themselves, and whose averages are versions: rounds, ledger, queue,
    sums, journal and the memory of calls are those of accumulators. Lives on one event loop.
    """

    def __init__(self, name: str, spec: ParametersSpec, incarnation: str, machine: Machine) -> None:
        """`begin` follows, or the restored versions."""
        self.name = name
        self.incarnation = incarnation
        self._spec = spec
        self._parts = machine
        self._changes, self._ledger, self._variables = machine.changes, machine.ledger, machine.variables
        self._versions = cast(Versions, machine.changes.averages)
        self._updates = cast(RunningUpdates | HeldUpdates, machine.changes.sum.summation)
        self._accumulator = Accumulator(name, spec.updates, incarnation, machine.changes, machine.waiters, WORDING)
        machine.queue.wake = machine.changes.serve_takers

    @property
    def spec(self) -> ParametersSpec:
        """The properties, with the rules of the next round."""
        rules = self._ledger.next_rules
        return self._spec if rules == self._spec.rules else self._spec.with_rules(rules)

    @property
    def place(self) -> Place:
        """The memory that holds everything."""
        return self._accumulator.place

    @property
    def rounds(self) -> Rounds:
        """The rounds, read-only."""
        return self._ledger.rounds

    @property
    def num_accumulated(self) -> int:
        """The number of updates in the round."""
        return self._accumulator.num_accumulated

    @property
    def is_changing(self) -> bool:
        """True while an update is being added or a round is ending, before `num_accumulated` shows it."""
        return self._accumulator.is_changing

    @property
    def durability(self) -> Durability | None:
        """The changes that survive the end of the server."""
        return self._spec.durability

    @property
    def ledger(self) -> UpdateLedger:
        """The decisions on updates and rounds, read-only."""
        return self._ledger

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current round, after the schedule."""
        rules = self._ledger.round_rules
        return rules.optimizer.learning_rate * rules.schedule.factor(self._variables.rounds)

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a version."""
        return len(self._parts.queue)

    @property
    def num_bytes(self) -> int:
        """The memory of versions, the optimizer's state and updates."""
        return self._accumulator.num_bytes

    @property
    def newest(self) -> Version:
        """The newest version."""
        newest = self._versions.history.newest()
        assert isinstance(newest, Version), "there is one from the beginning"
        return newest

    @property
    def state(self) -> ParametersState:
        """The current state."""
        rounds = self._accumulator.state
        return ParametersState(
            step=rounds.global_step,
            digest=self._variables.digest,
            num_updates=rounds.num_accumulated,
            num_waiting=rounds.num_waiting,
            num_bytes=rounds.num_bytes,
            worker_ids=rounds.worker_ids,
            kept_steps=rounds.kept_steps,
            weights=self._ledger.weights,
            num_required=self._ledger.closer.rules.num_required,
        )

    def update_spec(self, names: Sequence[str]) -> AccumulatorSpec:
        """Returns the spec of an update that has these components.

        Raises:
            InvalidArgumentError: There are none, or one does not exist or comes twice, or the reduction needs all.
        """
        known = self._spec.by_name
        for index, name in enumerate(names):
            if name not in known:
                raise InvalidArgumentError(
                    f"expected components out of {listed(sorted(known))}, got {quoted(name)}",
                    field=f"update[{index}].name",
                )
        if not names:
            raise InvalidArgumentError("expected at least one component, got none", field="update")
        if len(set(names)) < len(names):
            raise InvalidArgumentError("expected every component once, got one twice", field="update")
        self._spec.reduction.check_update(names, tuple(known))
        return self._spec.updates if len(names) == len(known) else self._spec.updates.only(names)

    async def push(
        self, call: RequestId | None, contribution: Contribution, open_update: OpenGradient
    ) -> tuple[Pushed, bool]:
        """Adds an update to the round, or drops it; also returns whether the call was a duplicate.

        Raises:
            InvalidArgumentError: The update is not valid here, or computed from a version that does not exist yet;
                nothing has changed.
            ServiceError: `open_update` failed, or a limit was reached; nothing has changed.
        """
        applied, duplicate = await self._accumulator.apply(call, contribution, open_update)
        return cast(Pushed, applied), duplicate

    async def push_pull(
        self, call: RequestId | None, contribution: Contribution, open_update: OpenGradient, timeout: float | None
    ) -> tuple[Pushed, Version, bool]:
        """Adds an update to the round and waits for the version that its round makes.

        Returns:
            The outcome; that version, or the newest for a stale update; and whether the call was a duplicate.

        Raises:
            ServiceError: See `push`. If the wait fails, the update stays in the round.
        """
        applied, average, duplicate = await self._accumulator.push_pull(
            call,
            contribution,
            open_update,
            self._parts.queue.num_required,
            timeout,
            one_per_worker=self._spec.one_per_worker,
        )
        assert average is not None, "there is a version from the beginning"
        return cast(Pushed, applied), cast(Version, average), duplicate

    async def read(self, step: int | None, timeout: float | None) -> Version:
        """Waits for the version of a step; returns the newest for None.

        Raises:
            OutOfRangeError: It is not kept, or no round led to that step.
            DeadlineExceededError: The step was not reached within `timeout` seconds.
        """
        return cast(Version, await self._accumulator.read_average(step, timeout))

    @asynccontextmanager
    async def reading_state(self) -> AsyncIterator[tuple[Version, OptimizerState]]:
        """Copies the state of the optimizer for the duration of a block, with the newest version.

        Raises:
            ResourceExhaustedError: There is no memory for the copy.
        """
        self._changes.check_open()
        memory, has_left = self._parts.memory.another(), False
        try:
            yield await self._changes.make(self._copy_state, memory, lambda: has_left)
        finally:
            has_left = True
            memory.settle(0)

    async def change(self, call: RequestId | None, changes: Changes) -> None:
        """Changes rules, from the next round on, or loads values. All or nothing, and once for each call.

        Raises:
            InvalidArgumentError: The rules, the values or the state do not fit.
            ResourceExhaustedError: There is not enough memory or disk; nothing has changed.
        """
        await self._accumulator.forget_overdue(call)
        if call is not None:
            self._versions.acknowledge(call)
        self._changes.check_open()
        with self._ledger.calls.room_for(call):
            await self._changes.make(self._change, call, changes)

    def records(self, since: int, most: int) -> tuple[list[RoundRecord], bool]:
        """Returns up to `most` records of rounds that led beyond a step, oldest first, and whether there are more."""
        return self._parts.records.since(since, most)

    def close(self, error: ServiceError) -> None:
        """Ends every wait with `error`, refuses later calls with it, and frees the memory."""
        self._changes.close(error)

    # Beginning

    async def begin(self, initial: Loaded) -> None:
        """Begins with values; before any other call.

        Raises:
            InvalidArgumentError: They do not fit.
            ResourceExhaustedError: There is not enough memory or disk.
        """
        await self._changes.make(self._change, None, Changes(loaded=initial, step=initial.step))

    async def begin_again(
        self,
        versions: Sequence[tuple[Average, Sequence[RequestId]]],
        state: OptimizerState,
        records: Sequence[RoundRecord],
    ) -> None:
        """Goes on where an earlier run of the server has ended, whose events the ledger has; before any call.

        Args:
            versions: The versions that are kept, oldest first, each with the calls that it answered.
            state: The state of the optimizer after the newest of them.
            records: The records of rounds, oldest first.

        Raises:
            InvalidArgumentError, ValueError: They do not fit together.
            ResourceExhaustedError: There is not enough memory.
        """
        newest = versions[-1][0]
        by_step = {record.step: record for record in records}
        if newest.num_gradients and newest.step not in by_step:
            raise ValueError(f"there is no record of the round that led to step {newest.step}")
        values = cast(Mapping[str, Array], newest.values)
        loaded = Loaded(values, newest.step, state, is_immutable=True)
        variables, ledger = self._variables, self._ledger
        variables.check_loaded(loaded, state.optimizer)
        with self._parts.memory.another() as memory:
            memory.grow(variables.state_bytes(state.optimizer) + sum([each.nbytes for each, _ in versions]))
            variables.stage_load(loaded, values, state.optimizer)()
            for optimizer, at_once in ((ledger.round_rules.optimizer, True), (ledger.next_rules.optimizer, False)):
                if optimizer != variables.next_optimizer:
                    memory.grow(variables.growth(optimizer, at_once=at_once))
                    variables.stage_optimizer(optimizer, at_once=at_once)()
            self._changes.sum.settle()
            for each, answered in versions:
                kept = Loaded(cast(Mapping[str, Array], each.values), each.step, is_immutable=True)
                variables.check_loaded(kept, state.optimizer)
                await self._accumulator.keep_again(version_of(each, record=by_step.get(each.step)), answered)
        dropped = [step for record in records for step in self._parts.records.add(record)]
        if self._parts.journal is not None:
            self._parts.journal.forget_rounds(dropped)  # the server crashed before it had
        self._versions.begin()
        self._ledger.resume()

    async def add_again(self, gradient: Gradient, contribution: Contribution) -> None:
        """Adds an update of the current round, which the ledger already has, to the sum; before any call.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        await self._accumulator.add_again(gradient, contribution)

    def go_on(self) -> None:
        """Ends the current round, or waits for its end; after everything was restored, on the event loop."""
        self._changes.serve_takers()

    # Under the lock of changes

    async def _copy_state(self, memory: Reservation, has_left: Callable[[], bool]) -> tuple[Version, OptimizerState]:
        state = self._variables.next_state
        arrays = [array for values in state.slots.values() for array in values.values()]
        num_bytes = sum([each.nbytes for each in arrays])
        if not has_left():  # otherwise nobody would give the memory back
            memory.grow(num_bytes)

        def copy() -> OptimizerState:
            slots = {
                slot: {name: np.copy(each) for name, each in values.items()} for slot, values in state.slots.items()
            }
            return replace(state, slots=slots)

        return self.newest, await self._attempt(copy)

    async def _change(self, call: RequestId | None, changes: Changes) -> None:
        known = self._ledger.calls.recall(call)
        if isinstance(known, Taken):
            return
        if known is not None:
            assert call is not None, "only calls with ids are known"
            raise call.other_content()
        if changes.loaded is not None:
            await self._load(call, changes, changes.loaded)
            return
        rules = changes.applied_to(self._ledger.next_rules)
        self._spec.with_rules(rules)  # checks that they go with the other properties
        if rules == self._ledger.next_rules and call is None:
            return
        at_once = not self._ledger.updates
        with self._parts.memory.another() as memory:
            memory.grow(self._variables.growth(rules.optimizer, at_once=at_once))
            change = await self._attempt(partial(self._variables.stage_optimizer, rules.optimizer, at_once=at_once))
            event = RulesChanged(call, rules, self._ledger.now)
            await self._changes.record(event)
            change()
            self._ledger.change_rules(event)
            self._changes.sum.settle()

    async def _load(self, call: RequestId | None, changes: Changes, loaded: Loaded) -> None:
        ledger, variables, sum_ = self._ledger, self._variables, self._changes.sum
        is_first = not ledger.rounds.current.number
        step = changes.step or 0
        if not is_first:
            step = max(step, ledger.rounds.global_step + 1)
        rules = changes.applied_to(ledger.next_rules)
        self._spec.with_rules(rules)
        variables.check_loaded(loaded, rules.optimizer)
        journal = self._parts.journal
        with self._parts.memory.another() as memory:
            memory.grow(variables.slot_bytes(rules.optimizer))
            arrays = await sum_.reserve_result()
            try:
                values = await self._attempt(self._placed, loaded, arrays)
                load = await self._attempt(variables.stage_load, loaded, values, rules.optimizer)
                event = VersionLoaded(call, ledger.now, step, rules)
                if journal is not None:
                    await journal.reserve_version(rules.optimizer)
                    await journal.append(event)
            except BaseException:
                sum_.settle()
                raise
            load()
            self._updates.drop()
            self._changes.observer.on_drop()
            number = ledger.rounds.current.number
            version = version_of(Average(values, step, number, 0, 0.0, ()), digest=variables.digest)
            if journal is not None:
                try:
                    await journal.settle(version, ())
                except ServiceError as error:
                    self.close(error)  # it may not be on disk
                    raise
            ledger.end_round(event)
            self._changes.settle_members()
            sum_.settle()
            if self._changes.is_closed:
                return  # deleted in the meantime
            self._versions.begin()
            self._versions.add(version, ())
            self._versions.history.step_set(step)
        self._parts.queue.fail_pulls(
            AbortedError(f"other values were loaded into parameters {self.name!r}: read the newest version")
        )

    def _placed(self, loaded: Loaded, arrays: Sequence[Array] | None) -> dict[str, Array]:
        """Returns values in memory that never changes, in the order of the components."""
        placed = {}
        for index, component in enumerate(self._spec.components):
            value = loaded.values[component.name]
            if loaded.is_immutable:
                placed[component.name] = value
                continue
            array = self.place.allocate(value.shape, component.dtype) if arrays is None else arrays[index]
            try:
                np.copyto(array, self.place.converted(value, component.dtype))
            except DoesNotFitError as error:
                raise InvalidArgumentError(
                    f"expected values of {component.dtype} for component {component.name!r}, got {error}",
                    field="values",
                ) from None
            self.place.protect(array)
            placed[component.name] = array
        return placed

    async def _attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs work on all values in a thread, unless there is little.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        try:
            return await self.place.attempt(self._spec.work, self._changes.sum.owner, function, *args)
        except MemoryError as error:
            raise ResourceExhaustedError("the server has no memory left for these values") from error
