"""Faults of accumulators that a simulated world must find.

They replace private steps of the server, as no call of its clients can plant such a fault.
"""

from dataclasses import replace
from typing import Any

import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.averages import AverageHistory, KeptAverages, UndeliveredAverages
from gradserve_server.accumulators.identity import CallMemory, CallsUnderWay
from gradserve_server.accumulators.journal import FileJournal
from gradserve_server.accumulators.ledger import Ledger, StepSet
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.sums.summation import WorkerOrderSum
from gradserve_server.accumulators.waits import TakeQueue
from gradserve_server.errors import AbortedError
from gradserve_server.storage import database as database_module
from gradserve_server.storage import store as store_module
from gradserve_server.storage.journal import IdWindow
from gradserve_server.storage.segments import Segments
from gradserve_server.storage.store import Change, StateStore
from gradserve_server.tensors.payload import Payload
from tests.simulation.planting import Fault, without
from tests.simulation.store import SimulatedStore


def forget_to_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segments, "flush", lambda self: self._unflushed.clear())


def acknowledge_early(patch: pytest.MonkeyPatch) -> None:
    def process(self: Any, group: Any) -> None:
        for each in group:
            if each.needs_bytes is None:
                self._settle(each)
        self._loop.call_later(0.05, real, self, group)

    real = SimulatedStore._process
    patch.setattr(SimulatedStore, "_process", process)


def commit_without_waiting_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    def plant(name: str) -> None:
        real: Any = vars(database_module)[name]

        def opened(*given: Any) -> Any:
            connection = real(*given)
            connection.execute("PRAGMA synchronous = NORMAL")
            return connection

        patch.setattr(database_module, name, opened)

    plant("open_database")
    plant("make_database")


def number_a_commit_before_it_is_on_disk(patch: pytest.MonkeyPatch) -> None:
    def carry_out(self: Any, group: Any) -> None:
        self._commits.write(self._newest + 1)
        real(self, group)

    real: Any = vars(StateStore)["_carry_out"]
    patch.setattr(StateStore, "_carry_out", carry_out)


def skip_the_id_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallMemory, "recall", lambda self, call: None)


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def init(self: Any, size: int) -> None:
        real(self, size - 1)

    real = IdWindow.__init__
    patch.setattr(IdWindow, "__init__", init)


def lose_a_pending_event(patch: pytest.MonkeyPatch) -> None:
    def change(self: Any) -> Change:
        if len(self._noted) > 1:
            del self._noted[0]
        return real(self)

    real = FileJournal.change
    patch.setattr(FileJournal, "change", change)


def publish_before_settling(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: Any, average: Any, answered: Any, *seen: Any) -> None:
        async def commit(change: Change) -> None:
            outer.add(change)

        outer = self.store
        self.store = _With(outer, commit=commit)
        try:
            await real(self, average, answered, *seen)
        finally:
            self.store = outer

    real = FileJournal.settle
    patch.setattr(FileJournal, "settle", settle)


class _With:
    """An object with some other methods."""

    def __init__(self, real: Any, **methods: Any) -> None:
        self._real = real
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def keep_blobs_of_averages(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Any, rounds: Any) -> None:
        change = Change()
        for number in rounds:
            if self._averages.pop(number, None) is not None:
                change.execute("DELETE FROM average WHERE accumulator = ? AND round = ?", self.number, number)
        self.store.add(change)

    patch.setattr(FileJournal, "forget", forget)


def believe_every_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "first_damaged", lambda *_: None)


def gradients_twice_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    async def add_again(self: Any, *given: Any) -> None:
        await real(self, *given)
        await real(self, *given)

    real = Accumulator.add_again
    patch.setattr(Accumulator, "add_again", add_again)


def step_not_written(patch: pytest.MonkeyPatch) -> None:
    async def append(self: Any, event: Any) -> None:
        if not isinstance(event, StepSet):
            await real(self, event)

    real = FileJournal.append
    patch.setattr(FileJournal, "append", append)


def abandoned_averages_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptAverages, "beyond", lambda *_: ())


def step_torn_from_its_round(patch: pytest.MonkeyPatch) -> None:
    def close(self: Any) -> Any:
        ended = real(self)
        self.global_step -= ended.number % 3 == 2
        return ended

    real = Rounds.close
    patch.setattr(Rounds, "close", close)


def lose_a_waiter(patch: pytest.MonkeyPatch) -> None:
    real: Any = TakeQueue.head
    patch.setattr(TakeQueue, "head", lambda self, members: None if members.count > 2 else real(self, members))


def forget_who_was_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "answered_by", lambda self, event: [])


def try_a_failed_flush_again(patch: pytest.MonkeyPatch) -> None:
    def flush(self: Any) -> None:
        try:
            real(self)
        except OSError:
            real(self)

    real = Segments.flush
    patch.setattr(Segments, "flush", flush)


def delete_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    def end(self: Any) -> Change:
        self.has_ended = True
        return Change()

    patch.setattr(FileJournal, "end", end)


def carry_out_both_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallsUnderWay, "find", lambda self, call: None)


def believe_that_an_old_call_is_new(patch: pytest.MonkeyPatch) -> None:
    def recall(self: Any, call: Any) -> Any:
        try:
            return real(self, call)
        except AbortedError:
            return None

    real: Any = CallMemory.recall
    patch.setattr(CallMemory, "recall", recall)


def serve_who_has_gone(patch: pytest.MonkeyPatch) -> None:
    def remove(self: Any, waiter: Any) -> None:
        if not waiter.answer.cancelled():
            real(self, waiter)

    real: Any = TakeQueue.remove
    patch.setattr(TakeQueue, "remove", remove)


def forget_an_undelivered_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UndeliveredAverages, "add", lambda self, average, calls: None)


def let_others_into_a_closed_queue(patch: pytest.MonkeyPatch) -> None:
    def append(self: Any, waiter: Any) -> None:
        closed, self._closed = self._closed, None
        real(self, waiter)
        self._closed = closed

    real: Any = TakeQueue.append
    patch.setattr(TakeQueue, "append", append)


def close_a_queue_without_a_word(patch: pytest.MonkeyPatch) -> None:
    def close(self: Any, error: Exception) -> None:
        self._waiters.clear()
        real(self, error)

    real: Any = TakeQueue.close
    patch.setattr(TakeQueue, "close", close)


def forget_the_readers_of_what_is_deleted(patch: pytest.MonkeyPatch) -> None:
    def close(self: Any, error: Exception) -> None:
        readings, self._readings = self._readings, {}
        real(self, error)
        self._readings = readings

    real: Any = AverageHistory.close
    patch.setattr(AverageHistory, "close", close)


def count_what_its_caller_has_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Payload, "check_lender", lambda self: None)


def hold_gradients_where_their_clients_have_them(patch: pytest.MonkeyPatch) -> None:
    def stage(self: Any, gradient: Any, *args: Any) -> Any:
        return real(self, replace(gradient, live=False), *args)

    real: Any = WorkerOrderSum.stage
    patch.setattr(WorkerOrderSum, "stage", stage)


def give_memory_back_while_it_is_read(patch: pytest.MonkeyPatch) -> None:
    def close(self: Any) -> None:
        self._users = 0
        real(self)

    real: Any = Payload.close
    patch.setattr(Payload, "close", close)


FAULTS: dict[str, Fault] = {
    "forget to flush": forget_to_flush,
    "acknowledge before the commit": acknowledge_early,
    "commit without waiting for the disk": commit_without_waiting_for_the_disk,
    "number a commit before it is on disk": number_a_commit_before_it_is_on_disk,
    "skip the id check": skip_the_id_check,
    "window off by one": window_off_by_one,
    "lose a pending event": lose_a_pending_event,
    "publish a round before it is settled": publish_before_settling,
    "gradients of the old round stay": without("DELETE FROM gradient"),
    "blobs of averages stay": keep_blobs_of_averages,
    "events stay when the ledger is written": without("INSERT INTO ledger"),
    "believe every checksum": believe_every_checksum,
    "gradients twice after a crash": gradients_twice_after_a_crash,
    "a step that was set is not written": step_not_written,
    "averages of abandoned steps are kept": abandoned_averages_served,
    "a step torn from its round": step_torn_from_its_round,
    "lose a waiter": lose_a_waiter,
    "forget whom a round answered": forget_who_was_answered,
    "try a failed flush again": try_a_failed_flush_again,
    "delete in memory only": delete_in_memory_only,
    "carry out both copies of a call": carry_out_both_copies,
    "believe that an old call is new": believe_that_an_old_call_is_new,
    "serve who has gone": serve_who_has_gone,
    "forget an average that was not delivered": forget_an_undelivered_average,
    "let others into a closed queue": let_others_into_a_closed_queue,
    "close a queue without a word": close_a_queue_without_a_word,
    "forget the readers of what is deleted": forget_the_readers_of_what_is_deleted,
    "count what its caller has given up": count_what_its_caller_has_given_up,
    "hold gradients where their clients have them": hold_gradients_where_their_clients_have_them,
    "give memory back while it is read": give_memory_back_while_it_is_read,
}
