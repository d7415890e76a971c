"""One server's parameters: orders the calls on them, and answers them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient, Measurement, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import Pushed, Rounds, Wording
from gradserve_server.errors import InvalidArgumentError, ServiceError
from gradserve_server.parameters.changes import Changer, Changes, Machine, Reported
from gradserve_server.parameters.ledger import UpdateLedger, WeightLedger
from gradserve_server.parameters.metrics import Evaluation, Report
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.record import DecidedRound, RoundRecord
from gradserve_server.parameters.reductions import measured_distances, measured_norm
from gradserve_server.parameters.sharding import Follower
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.variables import Loaded, OptimizerState
from gradserve_server.parameters.versions import PackedVersions, Version, Versions
from gradserve_server.storage.journal import Durability

WORDING = Wording("parameters", "update", "version")
"""The words of messages that parameters share with accumulators."""


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


class Parameters:
    """A model's parameters, which change in rounds. `ParameterService` in the protos defines the semantics.

    They are an accumulator whose rounds end by themselves, and whose averages are versions: rounds, ledger, queue,
    sums, journal and the memory of calls are those of accumulators. Lives on one event loop.
    """

    def __init__(self, name: str, spec: ParametersSpec, incarnation: str, machine: Machine) -> None:
        """`begin` follows, or the restored versions. `spec` is that of all servers."""
        self.name = name
        self.incarnation = incarnation
        self._spec = spec
        self._parts = machine
        self._changes, self._ledger, self._variables = machine.changes, machine.ledger, machine.variables
        self._versions = cast(Versions, machine.changes.averages)
        updates = machine.spec.updates
        self._accumulator = Accumulator(name, updates, incarnation, machine.changes, machine.waiters, WORDING)
        self._changer = Changer(name, machine)
        self.shard = machine.changes.shard
        """Holds the updates of sharded parameters until they count; None if they are on this server alone."""
        self._forgotten_at = 0
        """The step at which staged updates were last forgotten."""
        self.packed = PackedVersions(
            machine.changes.sum.place.compute, machine.memory, machine.variables.stepper.run_all
        )
        """The versions as they are read with a codec."""
        self._follower = None
        if self.shard is not None and spec.follows:
            self._follower = Follower(name, incarnation, machine, self._changer, self.shard)
        machine.queue.wake = machine.changes.serve_takers

    @property
    def spec(self) -> ParametersSpec:
        """The properties, with the rules of the next round."""
        rules = self._ledger.next_rules
        return self._spec if rules == self._spec.rules else self._spec.with_rules(rules)

    @property
    def here(self) -> ParametersSpec:
        """The properties of what is on this server; of sharded parameters, of its shard."""
        return self._parts.spec

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
        return self._ledger.round_rules.learning_rate(self._variables.rounds)

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a version, of those that push and of readers."""
        return len(self._parts.queue) + self._versions.history.num_readers

    @property
    def num_bytes(self) -> int:
        """The memory of versions, also as they are packed, the optimizer's state and updates."""
        return self._accumulator.num_bytes + self.packed.num_bytes

    @property
    def newest(self) -> Version:
        """The newest version."""
        return self._versions.newest

    @property
    def state(self) -> ParametersState:
        """The current state."""
        rounds, newest = self._accumulator.state, self._versions.history.newest()
        return ParametersState(
            step=rounds.global_step,
            digest=newest.digest if isinstance(newest, Version) else b"",
            num_updates=rounds.num_accumulated,
            num_waiting=self.num_waiting,
            num_bytes=self.num_bytes,
            worker_ids=rounds.worker_ids,
            kept_steps=rounds.kept_steps,
            weights=self._ledger.weights,
            num_required=self._ledger.closer.rules.num_required,
        )

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
        await self._forget_staged()
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
        await self._forget_staged()
        return cast(Pushed, applied), cast(Version, average), duplicate

    async def _forget_staged(self) -> None:
        """At the home of sharded parameters, forgets staged updates that can count no more, once for each step."""
        step = self.rounds.global_step
        if self.shard is not None and step > self._forgotten_at and not self._changes.is_closed:
            self._forgotten_at = step
            # One step later than necessary: a call that is under way with one should find it, to be told it is stale.
            await self.shard.forget_older(step - 1 - self._spec.staleness.max)

    async def read(self, step: int | None, timeout: float | None, call: RequestId | None = None) -> Version:
        """Waits for the version of a step; returns the newest for None.

        Args:
            step: The step.
            timeout: Seconds to wait; None for no limit.
            call: The id of the call, if it has one. A version of sharded parameters is kept at their home until a later
                call of its client.

        Raises:
            OutOfRangeError: It is not kept, or no round led to that step.
            DeadlineExceededError: The step was not reached within `timeout` seconds.
        """
        if self.shard is not None and step is not None and step not in self._versions.history.steps:
            # Kept for a call that reads its pieces from all servers.
            kept = next((each for each in self._versions.all_kept if each.step == step), None)
            if kept is not None:
                return self._versions.answered(kept, self.rounds)
        return cast(Version, await self._accumulator.read_average(step, timeout, call))

    @asynccontextmanager
    async def reading_state(self, optimizer: Optimizer | None = None) -> AsyncIterator[tuple[Version, OptimizerState]]:
        """Copies the state of the optimizer for the duration of a block, with the newest version.

        `optimizer` is that of the state at the home of sharded parameters, if that is another server: its state is a
        new one if there is that of another kind of optimizer here.

        Raises:
            InvalidArgumentError: There is an optimizer, and this is the home, or they are on one server.
            ResourceExhaustedError: There is no memory for the copy.
        """
        self._changes.check_open()
        if optimizer is not None:
            self._following("state_optimizer")
        memory, has_left = self._parts.memory.another(), False
        try:
            yield await self._changes.make(self._changer.copy_state, memory, lambda: has_left, optimizer)
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
            await self._changes.make(self._changer.change, call, changes)

    async def report(self, call: RequestId | None, report: Report) -> Reported:
        """Adds what somebody has measured of a version, once for each call, and for each worker and version.

        Raises:
            InvalidArgumentError: There is no such version yet, or its reports have too many names.
            OutOfRangeError: Neither the version nor a record of it is kept.
            ResourceExhaustedError: There is no room for it; nothing has changed.
        """
        await self._accumulator.forget_overdue(call)
        if call is not None:
            self._versions.acknowledge(call)
        self._changes.check_open()
        with self._ledger.calls.room_for(call):
            return await self._changes.make(self._changer.report, call, report)

    def evaluations(self, since: int | None, most: int) -> tuple[list[Evaluation], bool]:
        """Returns up to `most` evaluations of versions of later steps, by step, and whether there are more."""
        found = [each for each in self._ledger.evaluations if since is None or each.step > since]
        return found[:most], len(found) > most

    async def follow(self, rounds: Sequence[DecidedRound]) -> None:
        """Makes the versions of rounds that the home of sharded parameters has ended; see `Follower.follow`.

        Raises:
            InvalidArgumentError: This server is their home, or they are on one server.
        """
        await self._changes.make(self._following("decided").follow, rounds)

    async def hold(self, load_id: str, loaded: Loaded) -> None:
        """Holds values until the home of sharded parameters has decided that they are loaded; see `Follower.hold`.

        Raises:
            InvalidArgumentError: This server is their home, or they are on one server.
        """
        await self._changes.make(self._following("values").hold, load_id, loaded)

    def _following(self, field: str) -> Follower:
        if self._follower is None:
            raise InvalidArgumentError(
                f"expected none at the home of parameters {self.name!r}, which decides about rounds", field=field
            )
        return self._follower

    async def measure(self, key: PartKey) -> Measurement | None:
        """Measures what is here of a staged update, for the home, where it is to be counted.

        Whichever of two updates is staged later, its distance to the other is measured then. So those of all that can
        be in one round are known at the home with the last of them, and nothing is kept here that could be lost.

        Returns:
            Nothing if the update is not here any more; None if this is the home, or there is nothing to measure.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        spec, server, stepper = self.here, self._spec.server, self._variables.stepper
        if self._follower is None or self.shard is None or not spec.measures_norms:
            return None
        found = self.shard.with_others(key)
        if found is None:
            return Measurement(server, (), {})
        (own, others), distances = found, {}
        norm = await self._changer.attempt(measured_norm, own.dense, stepper.map, stepper.exact)
        if others and spec.measures_distances:
            arrays = [each.dense for each in others.values()]
            measured = await self._changer.attempt(
                measured_distances, own.dense, arrays, stepper.map, stepper.exact, times=len(others)
            )
            distances = dict(zip(others, measured, strict=True))
        return Measurement(server, norm, distances)

    async def count_updates(self) -> tuple[int, list[str]]:
        """Begins another epoch; returns it, and the ids of all staged updates that count, or that servers may need.

        Raises:
            InvalidArgumentError: They are not sharded, or this server is not their home.
        """
        if self.shard is None or self._follower is not None:
            raise InvalidArgumentError(f"this is not the home of sharded parameters {self.name!r}", field="parameters")
        epoch, counted = await self._changes.end_epoch()
        decided = [record.decided for record in self._parts.records if record.decided is not None]
        return epoch, [*counted, *[part_id for each in decided for part_id in each.part_ids]]

    def records(self, since: int, most: int) -> tuple[list[RoundRecord], bool]:
        """Returns up to `most` records of rounds that led beyond a step, oldest first, and whether there are more."""
        return self._parts.records.since(since, most)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The means of the metrics of the latest round; empty if its record is not kept."""
        newest = self._parts.records.newest()
        return {} if newest is None else newest.metrics

    def close(self, error: ServiceError) -> None:
        """Ends every wait with `error`, refuses later calls with it, and frees the memory."""
        self._changes.close(error)
        self._parts.records.close()
        self.packed.close()
        if self._follower is not None:
            self._follower.close()

    # Beginning

    async def begin(self, initial: Loaded) -> None:
        """Begins with values; before any other call.

        Raises:
            InvalidArgumentError: They do not fit.
            ResourceExhaustedError: There is not enough memory or disk.
        """
        await self._changes.make(self._changer.change, None, Changes(loaded=initial, step=initial.step))

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
        await self._changer.begin_again(versions, state, records)

    async def add_again(self, gradient: Gradient, contribution: Contribution) -> None:
        """Adds an update of the current round, which the ledger already has, to the sum; before any call.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        await self._accumulator.add_again(gradient, contribution)

    def go_on(self) -> None:
        """Ends the current round, or waits for its end; after everything was restored, on the event loop."""
        self._changes.serve_takers()
