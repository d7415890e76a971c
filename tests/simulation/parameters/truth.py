"""The truth about parameters: all that was sent, answered and seen of them, and what follows, whatever crashed."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import RoundRecord
from gradserve_server.parameters.reductions.spec import Mean, Sum
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.simulation.accumulators.gradients import bits_of
from tests.simulation.parameters.calls import Call, Calls, now
from tests.simulation.parameters.model import Member, Model
from tests.simulation.parameters.timing import Timing
from tests.simulation.parameters.updates import changed, number_of, values_of
from tests.simulation.promises import check


@dataclass(eq=False)
class Creation:
    """A call that creates parameters, or forks them.

    Attributes:
        key: Their name.
        spec: Their properties; None for a fork, which has those of its source.
        values: Their first values; None for a fork.
        source: The parameters of which it is a fork.
        step: The step of the version that is forked; None for the newest one.
        is_answered: Whether it was.
    """

    key: ResourceKey
    spec: ParametersSpec | None = None
    values: Mapping[str, Array] | None = None
    source: "Life | None" = None
    step: int | None = None
    is_answered: bool = False


@dataclass(frozen=True)
class Seen:
    """A version as it was first seen.

    Attributes:
        step: Its step.
        facts: Its digest, its bits and all else that never changes.
        epoch: The number of crashes before.
        at: The time by the clock of the world.
        model: The parameters as they have to be.
    """

    step: int
    facts: tuple[Any, ...]
    epoch: int
    at: float
    model: Model


@dataclass(eq=False)
class Life:
    """Parameters from their creation to their deletion.

    Attributes:
        spec: Their properties, with the first rules.
        is_promised: Whether their creation was answered.
        deleting: Whether somebody asked for their deletion.
        is_deleted: Whether that was answered.
        ended_at: When the server deleted them, by the clock of the world; None if it has not in this epoch.
        seen: The versions, by round.
        where: The round in which each update was seen.
        dropped: The rounds that a load ended.
        pending: The updates of the present round, in order of arrival.
        round: The number of the present round.
    """

    key: ResourceKey
    incarnation: str
    spec: ParametersSpec
    timing: Timing
    is_promised: bool = False
    deleting: bool = False
    is_deleted: bool = False
    ended_at: float | None = None
    seen: dict[int, Seen] = field(default_factory=dict)
    where: dict[int, int] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    records: dict[int, RoundRecord] = field(default_factory=dict)
    round: int = 0
    step: int = 0
    kept: tuple[int, ...] = ()
    newest: Version | None = None
    last_hash: bytes = bytes(32)
    applied: float = 0.0
    looked_at: tuple[Any, ...] = ()
    waiting_for_additions: "list[asyncio.Future[None]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = Calls(self)
        self.round_rules = self.next_rules = self.spec.rules

    async def until_something_is_added(self, seconds: float) -> None:
        """Returns while an update is being added, or after a while."""
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting_for_additions.append(begins)
        try:
            await asyncio.wait([begins], timeout=seconds)
        finally:
            self.waiting_for_additions.remove(begins)

    def something_is_added(self) -> None:
        """Notes that an update is about to be added."""
        for each in self.waiting_for_additions:
            if not each.done():
                each.set_result(None)

    @property
    def durability(self) -> Durability:
        """How much survives."""
        assert self.spec.durability is not None
        return self.spec.durability

    @property
    def model(self) -> Model:
        """The parameters as they have to be now."""
        return self.seen[self.round - 1].model

    # Beginning

    def begin(self, parameters: Parameters, creations: Sequence[Creation], epoch: int) -> None:
        """Looks at new parameters, of which no round has ended, given the calls that may have created them."""
        creation = creations[0]
        number, (version, *more) = parameters.rounds.current.number, parameters._versions.history.all_kept
        check((number, more) == (1, []), f"{self.key}: it begins with round {number}")
        assert isinstance(version, Version)
        if creation.source is None:
            assert creation.values is not None
            check(version.step == 0, f"{self.key}: it begins with step {version.step}")
            check(_bits(version) == bits_of(creation.values.values()), f"{self.key}: it begins with other values")
            model = Model.loaded(self.spec, self.spec.rules.optimizer, creation.values, None)
        else:
            has_step = any(each.step is not None for each in creations)
            model = self._forked(parameters, version, creation.source, has_step=has_step)
        self.seen[0] = Seen(version.step, _facts(version), epoch, now(), model)
        self.round, self.step = 1, version.step
        self._check_state(parameters)
        self.observe(parameters, epoch)

    def _forked(self, parameters: Parameters, version: Version, source: "Life", *, has_step: bool) -> Model:
        """Returns the parameters that a fork has to be: its source at some step, and the state at the newest."""
        found = [each for each in source.seen.values() if each.step == version.step]
        check(found, f"{self.key}: its source was never at step {version.step}")
        of_source = found[0].model
        check(_bits(version) == bits_of(of_source.values.values()), f"{self.key}: it differs from its source")
        optimizer = self.spec.rules.optimizer
        plain = Model.loaded(self.spec, optimizer, of_source.values, None)
        state = parameters._variables.state
        if has_step and not plain.differences(state):
            return plain  # a version that is not the newest one has no state
        kept = Model.of_optimizer(of_source, optimizer)
        if source.calls.have_other_optimizers and kept.differences(state):
            new = plain.of_optimizer(optimizer)
            return Model(self.spec, optimizer, of_source.masters, new.slots, new.component_steps, of_source.rounds)
        return Model(self.spec, optimizer, of_source.masters, kept.slots, kept.component_steps, of_source.rounds)

    def had(self, version: Version) -> bool:
        """Returns True if this is a version of these parameters."""
        facts = (version.step, _facts(version)[:2])
        return facts in [(each.step, each.facts[:2]) for each in self.seen.values()]

    # Looking

    def observe(self, parameters: Parameters, epoch: int) -> None:
        """Looks at everything that anybody could see now."""
        ledger, history = parameters._ledger, parameters._versions.history
        newest = history.newest()
        assert isinstance(newest, Version)
        now = (ledger.rounds.current.number, len(ledger.updates), newest, ledger.next_rules, history.steps)
        if now == self.looked_at:
            return
        self.looked_at = now
        number, step = ledger.rounds.current.number, ledger.rounds.global_step
        check(number in (self.round, self.round + 1), f"{self.key}: round {number} follows {self.round}")
        rules_before, pending_before = self.next_rules, self.pending
        if number > self.round:
            self._round_ended(newest, parameters, epoch)
            pending_before = []
        else:
            check(step == self.step, f"{self.key}: the step went from {self.step} to {step} without a round")
        self._look_at_rules(ledger.next_rules)
        pending = [number_of(each.weight_asked) for each in ledger.updates]
        self._look_at_pending(pending, parameters)
        if not pending:
            check(
                ledger.round_rules == self.next_rules, f"{self.key}: an empty round has the rules {ledger.round_rules}"
            )
        elif pending_before:
            check(ledger.round_rules == self.round_rules, f"{self.key}: the rules changed in the middle of a round")
        else:
            allowed = (rules_before, self.next_rules)
            check(ledger.round_rules in allowed, f"{self.key}: round {number} has the rules {ledger.round_rules}")
        self.round_rules, self.pending = ledger.round_rules, pending
        closer_rules = ledger.closer.rules, ledger.closer.next_rules
        expected = self.round_rules.rounds, self.next_rules.rounds
        check(closer_rules == expected, f"{self.key}: rounds end by {closer_rules}, not {expected}")
        for kept in history.all_kept:
            assert isinstance(kept, Version)
            self.see(kept)
        self._check_kept(parameters)
        self._check_weights(parameters)
        self.timing.look(self.round, pending, self.round_rules.rounds, parameters)
        self.newest, self.kept = newest, history.steps

    def _round_ended(self, newest: Version, parameters: Parameters, epoch: int) -> None:
        """Looks at the version of the round that has ended."""
        number = self.round
        check(newest.round_number == number, f"{self.key}: round {number} ended without a version")
        check(number not in self.seen, f"{self.key}: round {number} ended twice")
        if newest.record is None:
            model = self._loaded(newest)
        else:
            check(newest.step == self.step + 1, f"{self.key}: the step went from {self.step} to {newest.step}")
            model = self._stepped(newest, newest.record)
        check(
            _bits(newest) == bits_of(model.values.values()),
            f"{self.key}: the values of step {newest.step} are not those of its updates {self.members.get(number)}",
        )
        self.seen[number] = Seen(newest.step, _facts(newest), epoch, now(), model)
        self.round, self.step, self.pending = number + 1, newest.step, []
        there = parameters.rounds.global_step
        check(there == self.step, f"{self.key}: the newest version has step {self.step}, but the step is {there}")
        self._check_state(parameters)
        for call in self.calls.all:
            self.calls.check_member(call)

    def _loaded(self, newest: Version) -> Model:
        """Looks at a version that somebody has loaded."""
        bits = _bits(newest)
        found = [
            (call, call.changes, call.loaded)
            for call in self.calls.all
            if call.changes is not None and call.loaded is not None and bits_of(call.loaded.values.values()) == bits
        ]
        check(found, f"{self.key}: step {newest.step} was neither made by a round nor loaded")
        ((call, changes, loaded),) = found
        check(not call.is_applied, f"{call}: it was loaded twice")
        call.is_applied = True
        expected = max(changes.step or 0, self.step + 1)
        check(newest.step == expected, f"{call}: expected step {expected}, got {newest.step}")
        self.dropped.add(self.round)
        self.next_rules = self.round_rules = changes.applied_to(self.next_rules)
        return Model.loaded(self.spec, self.next_rules.optimizer, loaded.values, loaded.state)

    def _stepped(self, newest: Version, record: RoundRecord) -> Model:
        """Looks at a version that a round has made; returns the parameters as they have to be."""
        before, name = self.seen[self.round - 1], f"{self.key}: the record of step {newest.step}"
        check(record.step == newest.step, f"{name} says {record.step}")
        digests = (record.digest_before, record.digest_after)
        check(digests == (before.facts[0], newest.digest), f"{name} is about other values")
        check(record.hash == record.chained(self.last_hash).hash, f"{name} is torn from the chain")
        self.last_hash = record.hash
        self.records[record.step] = record
        numbers = [number_of(each.weight_asked) for each in record.updates]
        self.members[self.round] = numbers
        for number, update in zip(numbers, record.updates, strict=True):
            self._check_update(number, update.worker_id)
            call = self.calls.sent[number]
            earlier = self.where.setdefault(number, self.round)
            check(earlier == self.round, f"{self.key}: u{number} is in rounds {earlier} and {self.round}")
            staleness = self.step - call.contribution.local_step
            check(update.staleness == staleness, f"{name}: u{number} is {staleness} old, not {update.staleness}")
            self.calls.check_weight(call, update.weight, staleness)
            size = sum(each.nbytes for each in values_of(number, self.spec).values())
            check(update.num_bytes == size, f"{name}: u{number} has {size} bytes, not {update.num_bytes}")
        check(len(set(numbers)) == len(numbers), f"{name} has u{numbers} twice")
        if self.pending:
            check(numbers[: len(self.pending)] == self.pending, f"{name} has {numbers}, of {self.pending} in the round")
        workers = [each.worker_id for each in record.updates]
        named = tuple(dict.fromkeys([each for each in workers if each]))
        weight = math.fsum([each.weight for each in record.updates])
        self.applied += weight
        found = (newest.num_gradients, newest.worker_ids)
        check(found == (len(numbers), named), f"{name} has {numbers} of {workers}, its version {found}")
        check(math.isclose(newest.total_weight, weight), f"{name} has the weight {weight}, not {newest.total_weight}")
        if self.spec.one_per_worker:
            check(len(named) == len([each for each in workers if each]), f"{name} has workers twice: {workers}")
        for refusal in record.refusals:
            number = number_of(refusal.weight)
            self._check_update(number, refusal.worker_id)
            check(number not in numbers, f"{name}: u{number} counts, and was refused")
        rules = self._rules_of(record)
        self.timing.check_end(record, rules.rounds, name)
        model = before.model.after(
            [Member(number, each.weight, each.worker_id) for number, each in zip(numbers, record.updates, strict=True)],
            record.optimizer,
            rules.schedule,
        )
        lr = record.optimizer.learning_rate * rules.schedule.factor(before.model.rounds)
        check(record.lr == lr, f"{name}: the learning rate was {lr}, not {record.lr}")
        if model.reports:
            reports = [(each.norm, each.cosine, each.is_dropped) for each in model.reports]
            told = [(each.norm, each.cosine, each.dropped) for each in record.updates]
            check(told == reports, f"{name} says {told} of its updates, not {reports}")
        self._check_membership(before.model, newest, numbers)
        return model

    def _check_membership(self, before: Model, newest: Version, numbers: Sequence[int]) -> None:
        """Checks who is in a version, by the version alone, if it shows that."""
        record, is_plain = newest.record, isinstance(self.spec.reduction, Mean | Sum)
        assert record is not None
        optimizer = record.optimizer
        if is_plain and isinstance(optimizer, Sgd) and not optimizer.momentum and not optimizer.weight_decay:
            there = changed(before.values, newest.values)
            check(there == set(numbers), f"{self.key}: {sorted(there)} are in step {newest.step}, not {numbers}")

    def _rules_of(self, record: RoundRecord) -> Rules:
        """Returns the rules of the round that has ended."""
        if self.pending:
            rules = [self.round_rules]
        else:  # it began and ended between two looks
            rules = [self.round_rules, self.next_rules, *[each for each, _ in self._possible_rules()]]
        found = [each for each in rules if each.optimizer == record.optimizer]
        check(found, f"{self.key}: the record of step {record.step} has {record.optimizer}, not {rules[0].optimizer}")
        return found[0]

    def _possible_rules(self) -> list[tuple[Rules, Call]]:
        """Returns the rules that may come next, each with the call that asks for them."""
        return [
            (each.changes.applied_to(self.next_rules), each)
            for each in self.calls.all
            if each.changes is not None and each.loaded is None and not each.is_applied
        ]

    def _look_at_rules(self, rules: Rules) -> None:
        if rules == self.next_rules:
            return
        found = [call for possible, call in self._possible_rules() if possible == rules]
        check(found, f"{self.key}: the rules are {rules}, which nobody has asked for now")
        found[0].is_applied = True
        self.next_rules = rules

    def _look_at_pending(self, pending: list[int], parameters: Parameters) -> None:
        ledger = parameters._ledger
        for number, update in zip(pending, ledger.updates, strict=True):
            self._check_update(number, update.worker_id)
            check(number not in self.where, f"{self.key}: u{number} is in round {self.where.get(number)}, and pending")
        check(len(set(pending)) == len(pending), f"{self.key}: an update is pending twice: {pending}")
        is_longer = pending[: len(self.pending)] == self.pending
        check(is_longer, f"{self.key}: {self.pending} were pending, and now {pending}")
        counted = (ledger.rounds.members.count, ledger.closer.num_updates, parameters.state.num_updates)
        check(set(counted) == {len(pending)}, f"{self.key}: {pending} are pending, but {counted} are counted")

    def _check_update(self, number: int, worker_id: str) -> None:
        call = self.calls.sent.get(number)
        check(call is not None, f"{self.key}: u{number} is here, but nobody sent it")
        assert call is not None
        check(call.contribution.worker_id == worker_id, f"{call}: it came as one of {worker_id!r}")

    def _check_kept(self, parameters: Parameters) -> None:
        steps = parameters._versions.history.steps
        there = sorted({each.step for each in self.seen.values()})
        check(list(steps) == there[-self.spec.keep_versions :], f"{self.key}: versions {steps} are kept, of {there}")
        records, _ = parameters.records(-1, 10_000)
        all_records = [self.records[step] for step in sorted(self.records)]
        expected = all_records[-self.spec.keep_rounds :]
        kept = [each.step for each in records]
        check(records == expected, f"{self.key}: records {kept} are kept, of {[each.step for each in all_records]}")
        in_order = all(one.end_time <= other.end_time for one, other in pairwise(records))
        check(in_order, f"{self.key}: the ends of rounds go back in time")

    def _check_weights(self, parameters: Parameters) -> None:
        weights, ledger = parameters.state.weights, parameters._ledger
        loaded = weights.refused.get("loaded", 0.0)
        total = weights.applied + weights.pending + loaded
        check(math.isclose(weights.accepted, total), f"{self.key}: the weights do not add up: {weights}")
        pending = sum([each.weight for each in ledger.updates])
        check(math.isclose(weights.pending, pending), f"{self.key}: the weight {pending} is pending: {weights}")
        check(math.isclose(weights.applied, self.applied), f"{self.key}: {self.applied} was applied: {weights}")

    def _check_state(self, parameters: Parameters) -> None:
        if parameters._changes.is_under_way:
            return  # The next step may have been made, which is not on disk yet.
        differences = self.model.differences(parameters._variables.state)
        check(not differences, f"{self.key}: the state after step {self.step} is wrong: {'; '.join(differences)}")
        digest, seen = parameters._variables.digest, self.seen[self.round - 1].facts[0]
        check(digest == seen, f"{self.key}: the digest of step {self.step} is another one")

    def see(self, version: Version) -> None:
        """Looks at a version that was seen before."""
        seen = self.seen.get(version.round_number)
        check(seen is not None, f"{self.key}: there is a version of round {version.round_number}, which has not ended")
        assert seen is not None
        same = (version.step, _facts(version)) == (seen.step, seen.facts)
        same &= version.record in (None, self.records.get(version.step))  # it may be forgotten before the version
        check(same, f"{self.key}: the version of step {version.step} has changed")

    # Crashes

    def recovered(self, parameters: Parameters, epoch: int) -> None:
        """Looks at what the next server has found."""
        self.looked_at = ()
        ledger = parameters._ledger
        if ledger.rounds.current.number > self.round:
            self.timing.recovered(len(self.pending), self.round_rules.rounds)
        else:
            there = [number_of(each.weight_asked) for each in ledger.updates]
            is_round = self.durability is Durability.ROUND
            check(not (there and is_round), f"{self.key}: updates of an open round were written")
            # The last ones may have been on their way to the disk, and unanswered.
            if self.pending[: len(there)] == there:
                self.pending = there
            self.timing.recovered(len(there), self.round_rules.rounds)
        self.observe(parameters, epoch)
        if self.durability is Durability.GRADIENT:
            accepted = {
                each.number
                for each in self.calls.all
                if each.outcome is not None
                and each.outcome.outcome is Outcome.ACCEPTED
                and each.outcome.round is not None
                and each.outcome.round.number == self.round
            }
            lost = accepted - set(self.pending)
            check(not lost, f"{self.key}: {sorted(map(str, lost))} were accepted, but only {self.pending} are there")
        for call in self.calls.all:
            is_lost = call.changes is not None and call.is_answered and not call.is_applied
            check(not is_lost, f"{call}: it was answered, and has no effect")
        self._check_state(parameters)
        self.timing.check_left(self.pending, parameters, str(self.key))


def _bits(version: Version) -> bytes:
    return bits_of(version.arrays)


def _facts(version: Version) -> tuple[Any, ...]:
    told = (version.num_gradients, version.total_weight, version.worker_ids)
    return version.digest, _bits(version), told


def state_copy(state: OptimizerState) -> OptimizerState:
    """Returns a copy whose arrays nobody changes."""
    slots = {slot: {name: each.copy() for name, each in arrays.items()} for slot, arrays in state.slots.items()}
    return OptimizerState(slots, dict(state.component_steps), state.rounds, state.optimizer)
