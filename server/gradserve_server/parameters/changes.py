"""Changes of the rules and the values of parameters, while nothing else changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from gradserve_protocol.arrays import DoesNotFitError
from gradserve_server.accumulators.changes import RoundChanges
from gradserve_server.accumulators.gradient import Array, Average
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import Taken
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import (
    AbortedError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServiceError,
)
from gradserve_server.parameters.journal import ParametersJournal
from gradserve_server.parameters.ledger import EvaluationReported, RulesChanged, UpdateLedger, VersionLoaded
from gradserve_server.parameters.metrics import Evaluation, Report
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.queue import UpdateQueue
from gradserve_server.parameters.record import RoundRecord, RoundRecords
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.variables import Loaded, OptimizerState, Variables
from gradserve_server.parameters.versions import Version, Versions, version_of
from gradserve_server.resources.budget import Reservation


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
class Reported:
    """The outcome of a report on a version.

    Attributes:
        outcome: Whether it counts; ALREADY_COUNTED if its worker has reported on the version before.
        evaluation: The evaluation of the version. It may change later.
        is_duplicate: Whether an earlier call with the same id has brought the report.
    """

    outcome: Outcome
    evaluation: Evaluation
    is_duplicate: bool


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
        spec: The properties of what is on this server: of sharded parameters, of its shard.
    """

    changes: RoundChanges
    ledger: UpdateLedger
    queue: UpdateQueue
    variables: Variables
    records: RoundRecords
    journal: ParametersJournal | None
    memory: Reservation
    waiters: Reservation
    spec: ParametersSpec


class Changer:
    """Changes the rules and the values of parameters, and restores them. Every call has the lock of their changes."""

    def __init__(self, name: str, machine: Machine) -> None:
        self._name = name
        self._spec = machine.spec
        self._changes, self._ledger, self._variables = machine.changes, machine.ledger, machine.variables
        self._queue, self._records, self._journal = machine.queue, machine.records, machine.journal
        self._memory = machine.memory
        self._place = machine.changes.sum.place
        self._versions = cast(Versions, machine.changes.averages)

    async def copy_state(
        self, memory: Reservation, has_left: Callable[[], bool], optimizer: Optimizer | None
    ) -> tuple[Version, OptimizerState]:
        """Returns the newest version, and a copy of the state of the next round's optimizer, for which `memory` grows.

        Args:
            memory: An empty reservation.
            has_left: Returns whether the caller has given it back.
            optimizer: The optimizer of the next round at the home of sharded parameters; None if this is the home.

        Raises:
            ResourceExhaustedError: There is no memory for it.
        """
        state = self._variables.next_state
        if optimizer is not None and not optimizer.keeps_state_of(state.optimizer):
            with self._memory.another() as beside:
                beside.grow(self._variables.slot_bytes(optimizer))
                state = await self.attempt(self._variables.new_state, optimizer)
        arrays = [array for values in state.slots.values() for array in values.values()]
        num_bytes = sum([each.nbytes for each in arrays])
        if not has_left():  # otherwise nobody would give the memory back
            memory.grow(num_bytes)

        def copy() -> OptimizerState:
            slots = {
                slot: {name: np.copy(each) for name, each in values.items()} for slot, values in state.slots.items()
            }
            return replace(state, slots=slots)

        newest = self._versions.answered(self._versions.newest, self._ledger.rounds)
        return newest, await self.attempt(copy)

    async def change(self, call: RequestId | None, changes: Changes) -> None:
        """Makes changes, once for each call.

        Raises:
            InvalidArgumentError: The rules, the values or the state do not fit.
            ResourceExhaustedError: There is not enough memory or disk; nothing has changed.
        """
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
        with self._memory.another() as memory:
            memory.grow(self._variables.growth(rules.optimizer, at_once=at_once))
            change = await self.attempt(partial(self._variables.stage_optimizer, rules.optimizer, at_once=at_once))
            event = RulesChanged(call, rules, self._ledger.now)
            await self._changes.record(event)
            change()
            self._ledger.change_rules(event)
            self._changes.sum.settle()

    async def report(self, call: RequestId | None, report: Report) -> "Reported":
        """Adds what somebody has measured of a version, once for each call, and for each worker and version.

        Raises:
            InvalidArgumentError: There is no such version yet, or its reports have too many names.
            OutOfRangeError: Neither the version nor a record that has its digest is kept.
            ResourceExhaustedError: There is no room for it; nothing has changed.
        """
        ledger = self._ledger
        known = ledger.calls.recall(call)
        if known is not None and not isinstance(known, Taken):
            assert call is not None, "only calls with ids are known"
            raise call.other_content()
        step, found = report.step, ledger.evaluations.of(report.step)
        if known is not None or ledger.evaluations.has_counted(report):
            outcome = Outcome.ACCEPTED if known is not None else Outcome.ALREADY_COUNTED
            return Reported(outcome, found or Evaluation(step), is_duplicate=known is not None)
        self._check_evaluated(step)
        try:
            self._changes.grow_members(ledger.evaluations.growth(report))
            event = EvaluationReported(call, step, report.metrics, report.weight, report.worker_id)
            await self._changes.record(event)
            return Reported(Outcome.ACCEPTED, ledger.add_report(event), is_duplicate=False)
        finally:
            self._changes.settle_members()

    def _check_evaluated(self, step: int) -> None:
        newest = self._ledger.rounds.global_step
        if not 0 <= step <= newest:
            raise InvalidArgumentError(
                f"expected a step of at least 0 and at most {newest}, the step of the newest version, got {step}",
                field="step",
            )
        if step in self._versions.history.steps or self._ledger.evaluations.of(step) is not None:
            return
        if not self._records.knows(step):
            raise OutOfRangeError(
                f"expected the step of a version of which a record is kept, got {step}: it is too old",
                field="step",
                code="GS_STEP_NOT_KEPT",
            )

    async def _load(self, call: RequestId | None, changes: Changes, loaded: Loaded) -> None:
        ledger, variables, sum_ = self._ledger, self._variables, self._changes.sum
        is_first = not ledger.rounds.current.number
        step = changes.step or 0
        if not is_first:
            step = max(step, ledger.rounds.global_step + 1)
        rules = changes.applied_to(ledger.next_rules)
        self._spec.with_rules(rules)
        variables.check_loaded(loaded, rules.optimizer)
        journal = self._journal
        with self._memory.another() as memory:
            memory.grow(variables.slot_bytes(rules.optimizer))
            arrays = await sum_.reserve_result()
            try:
                values = await self.attempt(self._placed, loaded, arrays)
                load = await self.attempt(variables.stage_load, loaded, values, rules.optimizer)
                event = VersionLoaded(call, ledger.now, step, rules)
                if journal is not None:
                    await journal.reserve_version(rules.optimizer)
                    await journal.append(event)
            except BaseException:
                sum_.settle()
                raise
            load()
            sum_.summation.drop()  # its memory and that of the version count until the version is kept
            self._changes.observer.on_drop()
            number = ledger.rounds.current.number
            record = None if is_first else self._versions.record_of_load(event)
            version = version_of(Average(values, step, number, 0, 0.0, ()), digest=variables.digest, record=record)
            if journal is not None:
                try:
                    await journal.settle(version, ())
                except ServiceError as error:
                    self._changes.close(error)  # it may not be on disk
                    raise
            ledger.end_round(event)
            self._changes.settle_members()
            sum_.settle()
            if self._changes.is_closed:
                return  # deleted in the meantime
            self._versions.begin()
            self._versions.add(version, ())
            self._versions.history.step_set(step)
        self._queue.fail_pulls(
            AbortedError(
                f"other values were loaded into parameters {self._name!r}: read the newest version",
                code="GS_VALUES_LOADED",
            )
        )

    def _placed(self, loaded: Loaded, arrays: Sequence[Array] | None) -> dict[str, Array]:
        """Returns values in memory that never changes, in the order of the components."""
        placed = {}
        for index, component in enumerate(self._spec.components):
            value = loaded.values[component.name]
            if loaded.is_immutable:
                placed[component.name] = value
                continue
            array = self._place.allocate(value.shape, component.dtype) if arrays is None else arrays[index]
            try:
                np.copyto(array, self._place.converted(value, component.dtype))
            except DoesNotFitError as error:
                raise InvalidArgumentError(
                    f"expected values of {component.dtype} for component {component.name!r}, got {error}",
                    field="values",
                ) from None
            self._place.protect(array)
            placed[component.name] = array
        return placed

    async def attempt(self, function: Callable[..., Any], *args: Any, times: int = 1) -> Any:
        """Runs work on all values, perhaps several times as much, in a thread, unless there is little.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        try:
            return await self._place.attempt(self._spec.work * times, self._changes.sum.owner, function, *args)
        except MemoryError as error:
            raise ResourceExhaustedError(
                "the server has no memory left for these values", code="GS_NO_MEMORY"
            ) from error

    async def begin_again(
        self,
        versions: Sequence[tuple[Average, Sequence[RequestId]]],
        state: OptimizerState,
        records: Sequence[RoundRecord],
    ) -> None:
        """Goes on where an earlier run of the server has ended; see `Parameters.begin_again`."""
        newest = versions[-1][0]
        by_step = {record.step: record for record in records}
        if newest.num_gradients and newest.step not in by_step:
            raise ValueError(f"there is no record of the round that led to step {newest.step}")
        values = cast(Mapping[str, Array], newest.values)
        loaded = Loaded(values, newest.step, state, is_immutable=True)
        variables, ledger = self._variables, self._ledger
        variables.check_loaded(loaded, state.optimizer)
        with self._memory.another() as memory:
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
                await self._versions.keep_again(version_of(each, record=by_step.get(each.step)), answered)
        dropped = [step for record in records for step in self._records.add(record)]
        if self._journal is not None:
            self._journal.forget_rounds(dropped)  # the server crashed before it had
        self._versions.begin()
        self._ledger.resume()
