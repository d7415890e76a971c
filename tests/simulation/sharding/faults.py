"""Faults of sharded accumulators and parameters that a simulated world must find.

They replace private steps of the server, as no call of its clients can plant such a fault.
"""

from dataclasses import replace
from typing import Any

import pytest

from gradserve.calls.accumulators.cache import AccumulatorCache
from gradserve_server.accumulators import changes, records
from gradserve_server.accumulators.averages import AverageHistory, KeptAverages
from gradserve_server.accumulators.changes import RoundChanges
from gradserve_server.accumulators.gradient import RoundParts, Share
from gradserve_server.accumulators.identity import CallMemory
from gradserve_server.accumulators.journal import AccumulatorJournals, PartKey, ShardJournal
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.sharding.home import Decision, OrderedIncarnations, PartIncarnations
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import DecidedRound
from tests.simulation.planting import Fault


def reduce_what_is_there(patch: pytest.MonkeyPatch) -> None:
    def members(self: Any, decided: Any, home_incarnation: str, ids: Any) -> Any:
        keys = [PartKey(home_incarnation, each) for each in ids]
        return [self._parts[key] for key in keys if key in self._parts] or real(self, decided, home_incarnation, ids)

    real: Any = Shard._members
    patch.setattr(Shard, "_members", members)


def add_in_the_order_of_arrival_here(patch: pytest.MonkeyPatch) -> None:
    def members(self: Any, *arguments: Any) -> Any:
        held = real(self, *arguments)
        return [each for each in self._parts.values() if each in held]

    real: Any = Shard._members
    patch.setattr(Shard, "_members", members)


def acknowledge_without_writing(patch: pytest.MonkeyPatch) -> None:
    async def accept(self: Any, *_: Any) -> None:
        return None

    patch.setattr(ShardJournal, "accept", accept)


def forget_nothing(patch: pytest.MonkeyPatch) -> None:
    async def forget_before(self: Any, parts: Any) -> None:
        pass

    patch.setattr(Shard, "_forget_before", forget_before)


def make_parts_of_an_earlier_accumulator_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartIncarnations, "check_is_not_earlier", lambda *_: None)


def delete_parts_of_a_later_accumulator(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Any, key: Any, incarnation: str = "", *, home_incarnation: str = "") -> Any:
        return real(self, key, incarnation)

    real: Any = AccumulatorRegistry.delete
    patch.setattr(AccumulatorRegistry, "delete", delete)


def number_by_the_clock_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AccumulatorJournals, "note_number", lambda *_: None)
    patch.setattr(OrderedIncarnations, "restored", lambda *_: None)


def leave_out_a_gradient(patch: pytest.MonkeyPatch) -> None:
    def parts(self: Any, *arguments: Any) -> Any:
        decided = real(self, *arguments)
        if len(decided.ids) < 3:
            return decided
        return replace(decided, ids=decided.ids[1:], weights=decided.weights[1:])

    real: Any = Decision.parts
    patch.setattr(Decision, "parts", parts)


def decide_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    def parts(self: Any, *arguments: Any) -> Any:
        return real(replace(self, deterministic=False), *arguments)

    real: Any = Decision.parts
    patch.setattr(Decision, "parts", parts)


def count_a_call_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallMemory, "recall", lambda self, call: None)


def delete_at_the_home_only(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Any, container: str, name: str) -> Any:
        return self._home_of(container, name).delete(container, name)

    patch.setattr(AccumulatorCache, "delete", delete)


def forget_by_steps_of_an_earlier_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundParts, "may_need", lambda self, epoch, local_step: local_step >= self.oldest_step)


def stay_in_the_epoch_when_the_step_is_set(patch: pytest.MonkeyPatch) -> None:
    def set_global_step(self: Any, step: int) -> None:
        self.global_step = step

    patch.setattr(Rounds, "set_global_step", set_global_step)


def count_gradients_of_an_earlier_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(changes, "check_epoch", lambda *_: None)


def keep_what_stays_when_another_average_comes(patch: pytest.MonkeyPatch) -> None:
    def all_kept(self: Any) -> Any:
        return list(self._averages.values())[max(0, len(self._averages) + 1 - self._capacity) :]

    patch.setattr(AverageHistory, "all_kept", property(all_kept))


def keep_nothing_for_readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptAverages, "hold", lambda *_: True)


def hold_gradients_of_clients_that_have_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "asks_for_old_gradients", lambda _: False)


def withdraw_nothing(patch: pytest.MonkeyPatch) -> None:
    async def withdraw(self: Any, keys: Any) -> None:
        pass

    patch.setattr(Shard, "withdraw", withdraw)


def forget_what_counts(patch: pytest.MonkeyPatch) -> None:
    async def end_epoch(self: Any) -> Any:
        epoch, counted = await real(self)
        return epoch, counted[:-1]

    real: Any = RoundChanges._end_epoch
    patch.setattr(RoundChanges, "_end_epoch", end_epoch)


FAULTS: dict[str, Fault] = {
    "reduce what is there": reduce_what_is_there,
    "add in the order of arrival here": add_in_the_order_of_arrival_here,
    "acknowledge without writing": acknowledge_without_writing,
    "forget nothing": forget_nothing,
    "make parts of an earlier accumulator again": make_parts_of_an_earlier_accumulator_again,
    "delete parts of a later accumulator": delete_parts_of_a_later_accumulator,
    "number by the clock alone": number_by_the_clock_alone,
    "leave out a gradient": leave_out_a_gradient,
    "decide in the order of arrival": decide_in_the_order_of_arrival,
    "count a call twice": count_a_call_twice,
    "delete at the home only": delete_at_the_home_only,
    "forget by steps of an earlier epoch": forget_by_steps_of_an_earlier_epoch,
    "stay in the epoch when the step is set": stay_in_the_epoch_when_the_step_is_set,
    "count gradients of an earlier epoch": count_gradients_of_an_earlier_epoch,
    "keep what stays when another average comes": keep_what_stays_when_another_average_comes,
    "keep nothing for readers": keep_nothing_for_readers,
    "hold gradients of clients that have ended": hold_gradients_of_clients_that_have_ended,
    "withdraw nothing": withdraw_nothing,
    "forget what counts": forget_what_counts,
}


# Of sharded parameters


def count_norms_of_other_servers_twice(patch: pytest.MonkeyPatch) -> None:
    async def measure(self: Any, key: Any) -> Any:
        found = await real(self, key)
        return found and replace(found, squared_norm=found.squared_norm * 2)

    real: Any = Parameters.measure
    patch.setattr(Parameters, "measure", measure)


def measure_to_the_first_alone(patch: pytest.MonkeyPatch) -> None:
    def with_others(self: Any, key: Any) -> Any:
        own, others = real(self, key) or (None, {})
        return own and (own, dict(list(others.items())[:1]))

    real: Any = Shard.with_others
    patch.setattr(Shard, "with_others", with_others)


def tell_nobody_what_counts(patch: pytest.MonkeyPatch) -> None:
    plain = property(lambda decided: [Share(1.0, weight) for weight in decided.weights])
    patch.setattr(DecidedRound, "shares", plain)


def forget_measurements_on_disk(patch: pytest.MonkeyPatch) -> None:
    def record(contribution: Any) -> Any:
        return records.contribution_record(replace(contribution, measured=()))

    patch.setattr("gradserve_server.accumulators.journal.contribution_record", record)


PARAMETERS_FAULTS: dict[str, Fault] = {
    "count norms of other servers twice": count_norms_of_other_servers_twice,
    "measure to the first alone": measure_to_the_first_alone,
    "tell nobody what counts": tell_nobody_what_counts,
    "forget measurements on disk": forget_measurements_on_disk,
    "acknowledge without writing": acknowledge_without_writing,
    "count a call twice": count_a_call_twice,
}
