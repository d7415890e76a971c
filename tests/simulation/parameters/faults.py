"""Faults of parameters that a simulated world must find.

They replace private steps of the server, as no call of its clients can plant such a fault.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradserve_server.accumulators.journal import FileJournal
from gradserve_server.accumulators.ledger import Ledger
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.accumulators.waits import TakeQueue
from gradserve_server.parameters import journal as journal_module
from gradserve_server.parameters import update_sum
from gradserve_server.parameters.changes import Changer
from gradserve_server.parameters.closing import Closer
from gradserve_server.parameters.journal import ParametersJournal
from gradserve_server.parameters.ledger import RulesChanged, UpdateLedger, VersionLoaded
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.queue import UpdateQueue
from gradserve_server.parameters.record import RoundRecords
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.round_rules import Staleness
from gradserve_server.parameters.update_sum import HeldUpdates, RunningUpdates
from gradserve_server.parameters.variables import Variables
from gradserve_server.storage.store import Change
from tests.simulation.accumulators import faults as of_accumulators
from tests.simulation.planting import Fault, without


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """Returns a fault: a step is replaced by another one, which is made of it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def updates_twice_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    async def add_again(self: Any, *given: Any) -> None:
        await real(self, *given)
        await real(self, *given)

    real = Parameters.add_again
    patch.setattr(Parameters, "add_again", add_again)


def write_the_first_state_only(patch: pytest.MonkeyPatch) -> None:
    def execute(self: Change, text: str, *values: Any) -> None:
        if text.startswith("INSERT INTO parameters_state"):
            text = text[: text.index("DO UPDATE")] + "DO UPDATE SET blob = excluded.blob"
        real(self, text, *values)

    real = Change.execute
    patch.setattr(Change, "execute", execute)


def keep_blobs_of_states(patch: pytest.MonkeyPatch) -> None:
    def add_result(self: Any, *given: Any) -> None:
        self._state_blob = None
        real(self, *given)

    real = ParametersJournal.add_result
    patch.setattr(ParametersJournal, "add_result", add_result)


def count_rounds_from_zero_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    real: Any = journal_module.state_of
    patch.setattr("gradserve_server.parameters.restoring.state_of", lambda *given: replace(real(*given), rounds=0))


def round_masters_at_a_crash(patch: pytest.MonkeyPatch) -> None:
    def stage_load(self: Any, loaded: Any, values: Any, optimizer: Any) -> Any:
        rounded = {name: values[name] for name in self.narrow}
        state = loaded.state and replace(loaded.state, slots={**loaded.state.slots, "master": rounded})
        return real(self, replace(loaded, state=state), values, optimizer)

    real = Variables.stage_load
    patch.setattr(Variables, "stage_load", stage_load)


def keep_counts_for_another_optimizer(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Any) -> None:
        counts = dict(self.component_steps)
        real(self)
        self.component_steps = counts

    real: Any = vars(Variables)["_begin_present"]
    patch.setattr(Variables, "_begin_present", begin)


def change_rules_in_the_middle_of_a_round(patch: pytest.MonkeyPatch) -> None:
    def change_rules(self: Any, event: RulesChanged) -> None:
        real(self, event)
        self.round_rules = event.rules

    real = UpdateLedger.change_rules
    patch.setattr(UpdateLedger, "change_rules", change_rules)


def forget_the_call_of_a_change(patch: pytest.MonkeyPatch) -> None:
    real = UpdateLedger.change_rules
    patch.setattr(UpdateLedger, "change_rules", lambda self, event: real(self, replace(event, call=None)))


def note_changed_rules_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParametersJournal, "append", FileJournal.append)


def forget_the_call_of_a_load(patch: pytest.MonkeyPatch) -> None:
    def end_round(self: Any, event: Any) -> Any:
        return real(self, replace(event, taken_by=None) if isinstance(event, VersionLoaded) else event)

    real = Ledger.end_round
    patch.setattr(Ledger, "end_round", end_round)


def keep_the_sum_when_values_are_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningUpdates, "drop", lambda self: self._reports.clear())


def leave_the_weight_of_dropped_updates(patch: pytest.MonkeyPatch) -> None:
    def end_round(self: Any, event: Any) -> Any:
        if isinstance(event, VersionLoaded):
            self.weights.pending = 0.0
        return real(self, event)

    real = UpdateLedger.end_round
    patch.setattr(UpdateLedger, "end_round", end_round)


def refuse_what_was_accepted_and_lost(patch: pytest.MonkeyPatch) -> None:
    def judge(self: Any, call: Any, contribution: Any, *given: Any, **options: Any) -> Any:
        return real(self, call, replace(contribution, was_accepted=False), *given, **options)

    real = UpdateLedger.judge
    patch.setattr(UpdateLedger, "judge", judge)


def begin_the_grace_again_with_each_update(patch: pytest.MonkeyPatch) -> None:
    def admit(self: Any, now: float, worker_ids: Any, count: int) -> None:
        self._quorum = None
        real(self, now, worker_ids, count)

    real = Closer.admit
    patch.setattr(Closer, "admit", admit)


def end_a_round_without_its_grace(patch: pytest.MonkeyPatch) -> None:
    def end_of_grace(self: Any, is_alive: Any) -> Any:
        reason, end = real(self, is_alive)
        return (reason, self._quorum) if self._num_updates > self._rules.num_required else (reason, end)

    real: Any = vars(Closer)["_end_of_grace"]
    patch.setattr(Closer, "_end_of_grace", end_of_grace)


def forget_the_deadline_at_a_crash(patch: pytest.MonkeyPatch) -> None:
    def resume(self: Any) -> None:
        real(self)
        self.closer._deadline_began = None

    real = UpdateLedger.resume
    patch.setattr(UpdateLedger, "resume", resume)


def begin_times_again_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    def resume(self: Any) -> None:
        real(self)
        if self.closer._quorum is not None:
            self.closer._quorum = self.closer._time + 1.0

    real = UpdateLedger.resume
    patch.setattr(UpdateLedger, "resume", resume)


def forget_to_wake_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpdateQueue, "_wake_at", lambda *_: None)


def hold_updates_where_their_clients_have_them(patch: pytest.MonkeyPatch) -> None:
    real = HeldUpdates.stage
    patch.setattr(
        HeldUpdates, "stage", lambda self, gradient, *given: real(self, replace(gradient, live=False), *given)
    )


def report_in_the_order_of_workers(patch: pytest.MonkeyPatch) -> None:
    def stage_average(self: Any, *given: Any) -> Any:
        self._held.sort(key=lambda each: each[0].worker_id)
        return real(self, *given)

    real = HeldUpdates.stage_average
    patch.setattr(HeldUpdates, "stage_average", stage_average)


def forget_the_newest_hash(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, record: Any) -> Any:
        dropped = real(self, record)
        if dropped:
            self.last_hash = bytes(32)
        return dropped

    real = RoundRecords.add
    patch.setattr(RoundRecords, "add", add)


def leave_records_that_a_crash_has_left(patch: pytest.MonkeyPatch) -> None:
    def forget_rounds(self: Any, steps: Any) -> None:
        if self.store._loop is not None:
            real(self, steps)

    real = ParametersJournal.forget_rounds
    patch.setattr(ParametersJournal, "forget_rounds", forget_rounds)


def fork_without_the_state(patch: pytest.MonkeyPatch) -> None:
    async def forked(self: Any, spec: Any, fork: Any, lifetime: Any, version: Any, state: Any) -> Any:
        return await real(self, spec, fork, lifetime, version, None)

    real: Any = vars(ParametersRegistry)["_forked"]
    patch.setattr(ParametersRegistry, "_forked", forked)


def let_a_load_leave_the_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gradserve_server.parameters.versions.Versions.begin", lambda self: None)


def answer_only_one_who_waits(patch: pytest.MonkeyPatch) -> None:
    def serve(self: Any, head: Any, closed: Any, version: Any) -> None:
        self._by_round.clear()
        real(self, head, closed, version)

    real = TakeQueue.serve
    patch.setattr(UpdateQueue, "serve", serve)


def keep_the_memory_of_a_sum(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Any, givers: Any = ()) -> None:
        used = self._reservation.used
        real(self, givers)
        if not self._closed:
            self._reservation.settle(max(self._reservation.used, used))

    real = RoundSum.settle
    patch.setattr(RoundSum, "settle", settle)


def count_memory_for_readers_that_have_left(patch: pytest.MonkeyPatch) -> None:
    async def copy_state(self: Any, memory: Any, has_left: Any, optimizer: Any) -> Any:
        return await real(self, memory, lambda: False, optimizer)

    real = Changer.copy_state
    patch.setattr(Changer, "copy_state", copy_state)


FAULTS: dict[str, Fault] = {
    "skip the id check of an update": of_accumulators.skip_the_id_check,
    "carry out both copies of a push": of_accumulators.carry_out_both_copies,
    "publish a version before it is settled": of_accumulators.publish_before_settling,
    "lose an event of a round": of_accumulators.lose_a_pending_event,
    "delete parameters in memory only": of_accumulators.delete_in_memory_only,
    "updates of the old round stay": without("DELETE FROM parameters_update"),
    "updates twice after a crash": updates_twice_after_a_crash,
    "write the record of the first state only": write_the_first_state_only,
    "blobs of states stay": keep_blobs_of_states,
    "count rounds from zero after a crash": count_rounds_from_zero_after_a_crash,
    "round masters at a crash": round_masters_at_a_crash,
    "keep counts for another optimizer": keep_counts_for_another_optimizer,
    "change rules in the middle of a round": change_rules_in_the_middle_of_a_round,
    "forget the call of a change": forget_the_call_of_a_change,
    "note changed rules only": note_changed_rules_only,
    "forget the call of a load": forget_the_call_of_a_load,
    "keep the sum when values are loaded": keep_the_sum_when_values_are_loaded,
    "leave the weight of dropped updates": leave_the_weight_of_dropped_updates,
    "refuse what was accepted and lost": refuse_what_was_accepted_and_lost,
    "accept what is too stale": replaced(
        Staleness, "is_stale", lambda _: lambda self, staleness: staleness > self.max + 1
    ),
    "count what is stale in full": replaced(Staleness, "factor", lambda _: lambda self, staleness: 1.0),
    "begin the grace again with each update": begin_the_grace_again_with_each_update,
    "end a round without its grace": end_a_round_without_its_grace,
    "forget the deadline at a crash": forget_the_deadline_at_a_crash,
    "begin times again after a crash": begin_times_again_after_a_crash,
    "forget to wake up": forget_to_wake_up,
    "hold updates where their clients have them": hold_updates_where_their_clients_have_them,
    "add in the order of arrival": replaced(update_sum, "worker_order", lambda _: lambda contribution: ("", 0)),
    "report in the order of workers": report_in_the_order_of_workers,
    "forget the newest hash": forget_the_newest_hash,
    "leave records that a crash has left": leave_records_that_a_crash_has_left,
    "fork without the state": fork_without_the_state,
    "let a load leave the digest": let_a_load_leave_the_digest,
    "answer only one who waits": answer_only_one_who_waits,
    "keep the memory of a sum": keep_the_memory_of_a_sum,
    "count memory for readers that have left": count_memory_for_readers_that_have_left,
}
