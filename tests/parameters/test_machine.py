"""Random interleavings of everything that parameters can be asked, against a model of plain numbers."""

import asyncio
from sys import getsizeof
from typing import Any, cast

import numpy as np
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.journal import PARAMETERS, ParametersJournals, update_ledger_record
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.parameters.optimizers.optimizer import Schedule
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import NO_HASH
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.parameters.variables import Loaded
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import SHARED
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.journals import OneJournal
from tests.parameters.bench import ParametersBench, opened, sgd
from tests.parameters.machine_parts import (
    DTYPES,
    FORK,
    KEY,
    MASTER_BYTES,
    NARROW_BYTES,
    ROUND_RULES,
    SIZES,
    TOLERANCE,
    VERSION_BYTES,
    Recorder,
    Sent,
    arrays,
    behind,
    optimizer_of,
    rounds_of,
    spec_of,
    updates,
    values,
    weights,
    workers,
)
from tests.parameters.model import Made, Model, ModelRules


class ParametersMachine(RuleBasedStateMachine):
    """Calls are numbered; those with updates may be sent again as long as the machine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bench = ParametersBench()
        self.journal = Recorder()
        self.bench.registry = ParametersRegistry(
            self.bench.factory,
            self.bench.lifetimes,
            Stepper(ForkJoin(1)),
            new_incarnation=lambda: "only",
            journals=cast(ParametersJournals, OneJournal(self.journal)),
            wall_clock=lambda: int(self.bench.now * 1e9),
        )
        self.number = 0
        self.made: Parameters | None = None

    @property
    def parameters(self) -> Parameters:
        assert self.made is not None
        return self.made

    def teardown(self) -> None:
        if self.made is not None:
            self.delete()
        self.loop.close()

    # Steps

    @precondition(lambda self: self.made is None)
    @rule(initial=values, rounds=st.sampled_from(ROUND_RULES), step=st.integers(0, 3))
    def create(self, initial: dict[str, Any], rounds: dict[str, Any], step: int) -> None:
        rules = ModelRules(**rounds)
        self.spec = spec_of(rules)
        self.journal.records.clear()
        made, created = self.run(self.bench.registry.create(KEY, self.spec, SHARED, Loaded(arrays(initial), step)))
        assert created
        self.made = made
        self.model = Model(initial, rules, self.bench.now, step)
        self.sent: dict[int, Sent] = {}
        self.changes: dict[int, Changes] = {}
        self.waiting: dict[int, asyncio.Task[Any]] = {}
        self.reads: list[tuple[int, asyncio.Task[Any]]] = []
        self.lost: set[int] = set()
        self.base_bytes = self.bench.bookkeeping.used
        self.overdue = 0
        self.digests = {step: made.state.digest}
        """The digest of the version of each step, in their order."""

    @precondition(lambda self: self.made is not None)
    @rule(worker=workers, weight=weights, late=behind, update=updates, is_pull=st.booleans(), times=st.integers(1, 3))
    def push(self, worker: str, weight: float, late: int, update: Any, is_pull: bool, times: int) -> None:
        """Fresh and stale updates, sent up to three times at once."""
        self.number += 1
        contribution = Contribution(max(self.model.step - late, 0), weight, worker)
        round_number = self.model.round
        sent = Sent(contribution, update, is_pull, ("", 0, 0.0), round_number)
        tasks = [self.send(self.number, sent) for _ in range(times)]
        answer = self.model.push(worker, weight, contribution.local_step, update)
        self.sent[self.number] = Sent(contribution, update, is_pull, answer, round_number)
        if is_pull and answer[0] != "stale":
            self.model.expecting.add(self.number)
        self.look()
        for task in tasks:
            self.check_or_wait(self.number, task)
            if times > 1 and not task.done() and task is not tasks[-1]:
                task.cancel()
        self.settle()

    @precondition(lambda self: self.made is not None and self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """A reply was lost, or a caller gave up: it gets its first answer, whatever has happened since."""
        number = data.draw(st.sampled_from(sorted(self.sent)))
        if number in self.waiting:
            return
        self.lost.discard(number)
        task = self.send(number, self.sent[number])
        self.settle()
        self.check_or_wait(number, task, duplicate=True)

    @precondition(lambda self: self.made is not None)
    @rule(update=updates)
    def cancel_and_send_again(self, update: Any) -> None:
        """Whether the first had begun or not, it counts once."""
        self.number += 1
        sent = Sent(Contribution(self.model.step), update, False, ("", 0, 0.0), self.model.round)
        first = self.send(self.number, sent)
        self.loop.run_until_complete(asyncio.sleep(0))
        first.cancel()
        task = self.send(self.number, sent)
        answer = self.model.push("", 1.0, self.model.step, update)
        self.sent[self.number] = Sent(sent.contribution, update, False, answer, sent.round)
        self.look()
        self.check_or_wait(self.number, task)

    @precondition(lambda self: self.made is not None and self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The update stays in the round."""
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.pop(number).cancel()
        self.lost.add(number)
        self.settle()

    @precondition(lambda self: self.made is not None)
    @rule(
        what=st.sampled_from(["shape", "nan", "inf", "future", "weight", "tiny weight"]),
    )
    def push_malformed(self, what: str) -> None:
        update: dict[str, Any] = {"w": np.zeros(2)}
        contribution = Contribution(self.model.step)
        match what:
            case "shape":
                update["w"] = np.zeros(3)
            case "nan" | "inf":
                update["w"] = np.array([0, float(what)])
            case "future":
                contribution = Contribution(self.model.step + 1)
            case "weight":
                contribution = Contribution(self.model.step, float("inf"))
            case "tiny weight":
                contribution = Contribution(self.model.step, 2.0**-65)
        self.number += 1
        call = self.parameters.push(self.id(self.number), contribution, opened(update))
        self.fails(InvalidArgumentError, call)

    @precondition(lambda self: self.made is not None)
    @rule(ahead=st.integers(-3, 3))
    def read(self, ahead: int) -> None:
        step = self.model.step + ahead
        task = self.loop.create_task(self.parameters.read(step, None))
        self.settle()
        kept = {each.step: each for each in self.model.versions}
        if step in kept:
            self.check_version(task.result(), kept[step])
        elif ahead <= 0:
            assert isinstance(task.exception(), OutOfRangeError)
        else:
            self.reads.append((step, task))

    @precondition(lambda self: self.made is not None and self.reads)
    @rule(data=st.data())
    def give_up_reading(self, data: st.DataObject) -> None:
        _, task = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        task.cancel()
        self.settle()

    @precondition(lambda self: self.made is not None)
    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.bench.now += seconds
        self.model.now += seconds
        self.loop.call_soon(self.parameters.go_on)
        self.settle()
        self.look()

    @precondition(lambda self: self.made is not None)
    @rule(
        optimizer=st.none() | st.sampled_from([("sgd", 0.5), ("sgd", 1.0), ("momentum", 0.5), ("adam", 0.25)]),
        rounds=st.none() | st.sampled_from(ROUND_RULES),
        warmup=st.none() | st.integers(0, 4),
    )
    def change(self, optimizer: tuple[Any, float] | None, rounds: dict[str, Any] | None, warmup: int | None) -> None:
        changed: dict[str, Any] = dict(rounds or {})
        if optimizer is not None:
            changed["kind"], changed["lr"] = optimizer
        if warmup is not None:
            changed["warmup"] = warmup
        self.number += 1
        call = self.id(self.number)
        self.model.change(**changed)
        rules = self.model.next_rules
        self.changes[self.number] = Changes(
            None if optimizer is None else optimizer_of(rules),
            None if warmup is None else Schedule(warmup=rules.warmup),
            None if rounds is None else rounds_of(rules),
        )
        self.run(self.parameters.change(call, self.changes[self.number]))

    @precondition(lambda self: self.made is not None and self.changes)
    @rule(data=st.data())
    def change_again(self, data: st.DataObject) -> None:
        """It was made already, and others may have been made since."""
        number = data.draw(st.sampled_from(sorted(self.changes)))
        self.run(self.parameters.change(self.id(number), self.changes[number]))

    @precondition(lambda self: self.made is not None)
    @rule(loaded=values, ahead=st.integers(-1, 3) | st.none())
    def load(self, loaded: dict[str, Any], ahead: int | None) -> None:
        self.number += 1
        step = None if ahead is None else self.model.step + ahead
        changes = Changes(loaded=Loaded(arrays(loaded)), step=step)
        call = self.parameters.change(self.id(self.number), changes)
        self.changes[self.number] = changes
        self.model.load(loaded, max(self.model.step + 1, step or 0))
        self.run(call)
        for number, task in self.waiting.items():
            assert isinstance(task.exception(), AbortedError)
            self.lost.add(number)
        self.waiting = {}
        self.look()

    @precondition(lambda self: self.made is not None)
    @rule(update=values)
    def fork(self, update: dict[str, Any]) -> None:
        """It goes on as its origin would, and both are apart."""
        memory, bookkeeping = self.bench.memory.used, self.bench.bookkeeping.used
        records = list(self.journal.records)
        fork = self.run(self.bench.registry.fork(KEY, "", None, FORK, SHARED))
        assert (fork.state.step, fork.state.digest) == (self.model.step, self.parameters.state.digest)
        model = self.model.fork()
        self.run(fork.change(None, Changes(rounds=RoundRules(1))))
        model.change(num_required=1, min_required=1, grace=0.0, deadline=None)
        for _ in range(2):
            self.run(fork.push(None, Contribution(model.step), opened(arrays(update))))
            model.push("", 1.0, model.step, update)
            model.look()
            self.check_version(fork.newest, model.versions[-1])
        self.run(self.deleted(FORK))
        self.journal.records[:] = records
        assert (self.bench.memory.used, self.bench.bookkeeping.used) == (memory, bookkeeping)

    @precondition(lambda self: self.made is not None)
    @rule()
    def create_again(self) -> None:
        """Whoever comes later finds what there is, whatever values it brings."""
        spec = spec_of(ModelRules(lr=0.125))
        initial = Loaded(arrays({name: [9] * size for name, size in SIZES.items()}))
        assert self.run(self.bench.registry.create(KEY, spec, SHARED, initial)) == (self.made, False)

    @precondition(lambda self: self.made is not None)
    @rule()
    def delete(self) -> None:
        parameters = self.parameters
        self.run(self.deleted(KEY))
        for task in [*self.waiting.values(), *[task for _, task in self.reads]]:
            assert isinstance(task.exception(), AbortedError)
        self.fails(AbortedError, parameters.push(None, Contribution(), opened({"w": [0, 0]})))
        self.fails(AbortedError, parameters.change(None, Changes(sgd(lr=3.0))))
        self.made = None

    async def deleted(self, key: ResourceKey) -> None:
        assert self.bench.registry.delete(key)
        assert not self.bench.registry.has(key)
        try:
            self.bench.registry.get(key)
        except NotFoundError:
            return
        raise AssertionError

    # After each

    @invariant()
    def agrees(self) -> None:
        if self.made is None:
            return
        state, model = self.parameters.state, self.model
        self.check_version(self.parameters.newest, model.versions[-1])
        assert (state.step, state.kept_steps) == (model.step, tuple(each.step for each in model.versions))
        assert (state.num_updates, set(state.worker_ids)) == (len(model.updates), model.workers)
        self.digests.setdefault(state.step, state.digest)
        assert self.digests[state.step] == state.digest == self.parameters.newest.digest
        assert state.num_required == model.rules.num_required
        assert self.parameters.spec == spec_of(model.next_rules).resolved(Durability.NONE)
        assert not any(task.done() for task in [*self.waiting.values(), *[task for _, task in self.reads]])

    @invariant()
    def every_weight_is_accounted_for(self) -> None:
        if self.made is None:
            return
        found, model = self.parameters.state.weights, self.model
        assert (found.accepted, found.applied, found.pending) == (model.accepted, model.applied, model.pending)
        assert found.refused == model.refused
        assert found.accepted == found.applied + found.pending + found.refused.get("loaded", 0.0)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        waiters = self.bench.factory.waiters.used
        if self.made is None:
            assert (self.bench.memory.used, self.bench.bookkeeping.used, waiters) == (0, 0, 0)
            return
        model = self.model
        assert self.parameters.state.num_waiting == waiters == len(self.waiting) + len(self.reads)
        sums = sum(MASTER_BYTES[name] for name in {name for each in model.updates for name in each.update})
        slots = model.num_slot_vectors * sum(MASTER_BYTES.values())
        expected = VERSION_BYTES * len(model.kept_rounds) + NARROW_BYTES + slots + sums
        assert self.bench.memory.used == self.parameters.state.num_bytes == expected
        known = len(self.sent) + len(self.changes)
        calls = 640 * known + (1024 if known else 0)
        found, _ = self.parameters.records(-1, 1 << 20)
        workers = [each.worker_id for record in found for each in record.updates]
        workers += [each.worker_id for record in found for each in record.refusals]
        records = 768 * len(found) + sum(272 + getsizeof(worker_id) for worker_id in workers)
        bookkeeping = self.base_bytes + calls + records + 768 * model.num_named + (12 << 10) * waiters
        assert self.bench.bookkeeping.used == bookkeeping
        assert self.bench.memory.held_by("chief") == self.bench.memory.held_in("test") == self.bench.memory.used

    @invariant()
    def records_are_a_chain(self) -> None:
        if self.made is None:
            return
        records, _ = self.parameters.records(-1, 1 << 20)
        before = NO_HASH
        for record, ended in zip(records, self.model.records, strict=True):
            assert record.chained(before) == record
            before = record.hash
            assert (record.step, record.reason, record.lr) == (ended.step, ended.reason, ended.lr)
            found = tuple((each.worker_id, each.weight_asked, each.weight, each.staleness) for each in record.updates)
            assert (found, len(record.refusals)) == (ended.updates, ended.refused)
            earlier = [digest for step, digest in self.digests.items() if step < record.step]
            assert (record.digest_before, record.digest_after) == (earlier[-1], self.digests[record.step])

    @invariant()
    def the_same_events_give_the_same_ledger(self) -> None:
        if self.made is None:
            return
        live = self.parameters.ledger
        calls = self.bench.factory.new_call_memory(Budget(1 << 40, "bytes").reserve())
        replayed = UpdateLedger(calls, self.spec)
        for record in self.journal.records:
            replayed.replay(PARAMETERS.event_of(record))
        one, other = update_ledger_record(live), update_ledger_record(replayed)
        for record in (one, other):
            record["awaiting"].sort()
            del record["time"]
            for name in ("time", "deadline_began"):  # verdicts are no events
                del record["closer"][name]
        assert one == other

    # Calls

    def id(self, number: int) -> RequestId:
        unanswered = {each for each in {*self.lost, *self.waiting} if each < number}
        self.model.heard_of(number, unanswered)
        return RequestId("client", number, unanswered=frozenset(unanswered))

    def send(self, number: int, sent: Sent) -> "asyncio.Task[Any]":
        update = opened(arrays(sent.update))
        if not sent.is_pull:
            return self.loop.create_task(self.parameters.push(self.id(number), sent.contribution, update))
        return self.loop.create_task(self.parameters.push_pull(self.id(number), sent.contribution, update, None))

    def look(self) -> None:
        """Lets rounds end, and checks those who waited for it."""
        self.model.look()
        self.settle()
        for number, task in list(self.waiting.items()):
            if self.sent[number].round in self.model.ended_rounds:
                self.check_or_wait(number, self.waiting.pop(number))
            elif self.model.overdue > self.overdue:
                assert isinstance(task.exception(), DeadlineExceededError)
                del self.waiting[number]
                self.lost.add(number)
        self.overdue = self.model.overdue
        by_step = {each.step: each for each in self.model.ended_rounds.values()}
        for step, task in list(self.reads):
            if step > self.model.step:
                continue
            self.reads.remove((step, task))
            if step in by_step:
                self.check_version(task.result(), by_step[step])
            else:
                assert isinstance(task.exception(), OutOfRangeError)

    def check_or_wait(self, number: int, task: "asyncio.Task[Any]", duplicate: bool | None = None) -> None:
        sent = self.sent[number]
        outcome, staleness, weight = sent.answer
        if not sent.is_pull or outcome == "stale":
            pushed, *version, again = task.result()
            for each in version:
                self.check_version(each, self.model.versions[-1])
        elif sent.round not in self.model.ended_rounds:
            if not task.done():
                self.waiting[number] = task
                return
            assert self.model.overdue > self.overdue
            return
        elif duplicate and sent.round not in self.model.kept_rounds:
            assert isinstance(task.exception(), AbortedError)
            return
        else:
            pushed, version, again = task.result()
            self.check_version(version, self.model.ended_rounds[sent.round])
        assert duplicate is None or again == duplicate
        outcomes = {"stale": Outcome.STALE, "accepted": Outcome.ACCEPTED, "already counted": Outcome.ALREADY_COUNTED}
        assert (pushed.outcome, pushed.staleness, pushed.weight) == (outcomes[outcome], staleness, weight)

    def check_version(self, found: Version, expected: Made) -> None:
        assert found.step == expected.step
        hashes = b"".join(xxhash.xxh3_128_digest(np.asarray(each).tobytes()) for each in found.values.values())
        assert found.digest == xxhash.xxh3_128_digest(hashes)
        for name, value in found.values.items():
            assert isinstance(value, np.ndarray)
            assert (value.dtype, value.flags.writeable) == (DTYPES[name], False)
            tolerance = TOLERANCE[name]
            np.testing.assert_allclose(
                value.astype(np.float64), expected.values[name], rtol=tolerance, atol=tolerance, err_msg=name
            )

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


ParametersMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestParametersMachine = ParametersMachine.TestCase
