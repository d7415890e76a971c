"""The averages that an accumulator keeps: for readers, and for calls that may not have received them yet."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gradserve_server.accumulators.gradient import Average, HostCopy, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.places.place import AverageCopies
from gradserve_server.accumulators.rounds import OF_ACCUMULATORS, Round, Rounds, Wording
from gradserve_server.accumulators.sharding.home import Decision, as_of_now
from gradserve_server.errors import AbortedError, OutOfRangeError
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import Turn


class KeptBytes:
    """Counts the memory of averages, each once, even if both the history and a call keep it.

    Attributes:
        total: The bytes of all kept averages.
    """

    def __init__(self) -> None:
        self.total = 0
        self._keepers: dict[int, int] = {}
        """The keepers of the average of each round, counted by number of the round."""
        self._dropped: list[int] = []

    def add(self, average: Average) -> None:
        """Counts another keeper of an average."""
        keepers = self._keepers.get(average.round_number, 0)
        self._keepers[average.round_number] = keepers + 1
        if not keepers:
            self.total += average.nbytes

    def remove(self, average: Average) -> None:
        """Removes a keeper of an average, which is released with the last."""
        keepers = self._keepers.pop(average.round_number) - 1
        if keepers:
            self._keepers[average.round_number] = keepers
        else:
            self.total -= average.nbytes
            average.release()
            self._dropped.append(average.round_number)

    def take_dropped(self) -> list[int]:
        """Returns the numbers of the rounds whose averages were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped


_MOST_NAMED = 20


class _Reading:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Average] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self.readers = 0


class AverageHistory:
    """The latest averages, by step, for any number of readers."""

    def __init__(self, capacity: int, kept: KeptBytes, wording: Wording = OF_ACCUMULATORS) -> None:
        self._capacity = capacity
        self._wording = wording
        self._kept = kept
        self._by_round: dict[int, Average] = {}
        self._averages: OrderedDict[int, Average] = OrderedDict()
        self._readings: dict[int | None, _Reading] = {}
        self._closed: Exception | None = None

    @property
    def rounds(self) -> Collection[int]:
        """The numbers of the rounds whose averages are kept."""
        return self._by_round.keys()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose averages are kept, oldest first."""
        return tuple(self._averages)

    @property
    def num_readers(self) -> int:
        """The number of readers that wait."""
        return sum([reading.readers for reading in self._readings.values()])

    @property
    def all_kept(self) -> list[Average]:
        """All kept averages."""
        return list(self._averages.values())

    def newest(self) -> Average | None:
        """Returns the average of the last round, None before the first."""
        return next(reversed(self._averages.values()), None)

    def get(self, step: int) -> Average | None:
        """Returns the average of the round that led to `step`, None if it is not kept."""
        return self._averages.get(step)

    def of_round(self, number: int) -> Average | None:
        """Returns the average of a round, None if it is not kept."""
        return self._by_round.get(number)

    def add(self, average: Average) -> None:
        """Keeps an average in place of the oldest, and answers the readers that wait for it."""
        replaced = self._averages.pop(average.step, None)
        if replaced is not None:
            self._forget(replaced)
        self._averages[average.step] = self._by_round[average.round_number] = average
        self._kept.add(average)
        while len(self._averages) > self._capacity:
            self._forget(self._averages.popitem(last=False)[1])
        for key in (average.step, None):
            reading = self._readings.pop(key, None)
            if reading is not None:
                reading.answer.set_result(average)

    async def read(self, step: int | None, global_step: int) -> Average:
        """Waits for the average of the round that leads to `step`.

        Args:
            step: The step; None for the newest average.
            global_step: The accumulator's current step.

        Raises:
            OutOfRangeError: The average is not kept, or no round will lead to the step.
            Exception: The error of `close`, if that was called.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        average = self.newest() if step is None else self.get(step)
        if average is not None:
            return average
        if step is not None and step <= global_step:
            raise self._gone(step)
        reading = self._readings.setdefault(step, _Reading())
        reading.readers += 1
        try:
            return await asyncio.shield(reading.answer)
        finally:
            reading.readers -= 1
            if reading.readers == 0 and self._readings.get(step) is reading:
                del self._readings[step]

    def drop(self, rounds: Collection[int]) -> None:
        """Drops the averages of rounds."""
        for average in [each for each in self._averages.values() if each.round_number in rounds]:
            del self._averages[average.step]
            self._forget(average)

    def step_set(self, global_step: int) -> None:
        """Fails the readers of steps that no round can lead to any more."""
        for step in [step for step in self._readings if step is not None and step <= global_step]:
            self._readings.pop(step).answer.set_exception(self._gone(step))

    def close(self, error: Exception) -> None:
        """Fails all readers, and later ones too, and drops the averages."""
        self._closed = error
        for reading in self._readings.values():
            reading.answer.set_exception(error)
        self._readings.clear()
        for average in self._averages.values():
            self._forget(average)
        self._averages.clear()

    def _forget(self, average: Average) -> None:
        del self._by_round[average.round_number]
        self._kept.remove(average)

    def _gone(self, step: int) -> OutOfRangeError:
        newest = list(islice(reversed(self._averages), _MOST_NAMED))
        kept = ", ".join(map(str, reversed(newest))) or "none"
        if len(newest) < len(self._averages):
            kept = f"..., {kept}"
        return OutOfRangeError(
            f"no {self._wording.result} of step {step} is kept; expected one of the kept steps ({kept}) or a later "
            "step",
            field="step",
            code="GS_STEP_NOT_KEPT",
        )


@dataclass
class _Held:
    average: Average
    calls: dict[tuple[str, int], None] = field(default_factory=dict)
    is_withdrawn: bool = False


class UndeliveredAverages:
    """Keeps the average of a round until the calls that it answered have received it.

    A reply can be lost and its call repeated. So an average is kept until a later call of the same client acknowledges
    the answer, or until its lease ends.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float], kept: KeptBytes) -> None:
        self._kept = kept
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._calls: OrderedDict[tuple[str, int], tuple[float, int]] = OrderedDict()
        self._by_client: dict[str, set[int]] = {}
        self._rounds: OrderedDict[int, _Held] = OrderedDict()

    @property
    def next_deadline(self) -> float | None:
        """The time at which the oldest lease ends; None if nothing is kept."""
        first = next(iter(self._calls.values()), None)
        return None if first is None else first[0]

    @property
    def averages(self) -> list[Average]:
        """All kept averages."""
        return [held.average for held in self._rounds.values()]

    def get(self, round_number: int) -> Average | None:
        """Returns the average of a round; None if it is not kept or was withdrawn."""
        held = self._rounds.get(round_number)
        return None if held is None or held.is_withdrawn else held.average

    def add(self, average: Average, calls: Iterable[RequestId]) -> None:
        """Keeps an average for the calls that it answers."""
        deadline = self._clock() + self._lease_seconds
        for call in calls:
            key = (call.client_id, call.sequence)
            if key in self._calls:
                if self._calls[key][1] == average.round_number:
                    continue
                self._release(*key)
            held = self._rounds.get(average.round_number)
            if held is None:
                held = self._rounds[average.round_number] = _Held(average)
                self._kept.add(average)
            held.calls[key] = None
            self._calls[key] = (deadline, average.round_number)
            self._by_client.setdefault(call.client_id, set()).add(call.sequence)

    def acknowledge(self, call: RequestId) -> bool:
        """Releases the averages that the client has received; returns whether there were any."""
        sequences = self._by_client.get(call.client_id)
        if not sequences:
            return False
        received = [each for each in sequences if call.acknowledges(each)]
        for sequence in received:
            self._release(call.client_id, sequence)
        return bool(received)

    def expire(self, turn: Turn) -> int:
        """Releases the averages of calls whose lease has ended, in one turn; returns the number of calls."""
        now, count = self._clock(), 0
        while self._calls and next(iter(self._calls.values()))[0] <= now and turn.look():
            self._release(*next(iter(self._calls)))
            count += 1
        return count

    def drop_oldest(self, besides: Container[int]) -> bool:
        """Drops the oldest average of a round not in `besides`; returns False if there is none."""
        oldest = next((number for number in self._rounds if number not in besides), None)
        if oldest is None:
            return False
        for key in list(self._rounds[oldest].calls):
            self._release(*key)
        return True

    def withdraw(self, rounds: Iterable[int]) -> None:
        """Stops answering calls with the averages of rounds.

        Those of a sharded accumulator are still kept: servers may still have to compute them for earlier
        answers, and forget their gradients once the averages are dropped.
        """
        for number in rounds:
            held = self._rounds.get(number)
            if held is None:
                continue
            held.is_withdrawn = True
            if held.average.parts is None:
                for key in list(held.calls):
                    self._release(*key)

    def clear(self) -> None:
        """Releases all averages."""
        self._calls.clear()
        self._by_client.clear()
        for held in self._rounds.values():
            self._kept.remove(held.average)
        self._rounds.clear()

    def _release(self, client_id: str, sequence: int) -> None:
        _, number = self._calls.pop((client_id, sequence))
        sequences = self._by_client[client_id]
        sequences.remove(sequence)
        if not sequences:
            del self._by_client[client_id]
        held = self._rounds[number]
        del held.calls[client_id, sequence]
        if not held.calls:
            del self._rounds[number]
            self._kept.remove(held.average)


def average_of_current(rounds: Rounds, values: Mapping[str, Value], host_copy: HostCopy | None) -> Average:
    """Returns the average of the round that is about to end, given its values and their copy on the host."""
    members = rounds.members
    return Average(
        values=values,
        step=rounds.next_step,
        round_number=rounds.current.number,
        num_gradients=members.count,
        total_weight=members.total_weight,
        worker_ids=tuple(members.workers),
        host_copy=host_copy,
        different_workers=rounds.comparison.compared(members.digests),
    )


class KeptAverages:
    """All averages that an accumulator keeps, and their memory.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        history: AverageHistory,
        undelivered: UndeliveredAverages,
        kept: KeptBytes,
        memory: Reservation,
        copies: AverageCopies,
        expire_at: Callable[[float, "KeptAverages"], None],
        forget: Callable[[Collection[int]], None] = lambda _: None,
        decision: Decision | None = None,
    ) -> None:
        """Takes the parts that keep averages, and the budget of memory.

        Args:
            history: Keeps averages for readers.
            undelivered: Keeps averages for calls that may be sent again.
            kept: Counts the memory of the averages of both.
            memory: The budget of bytes.
            copies: Copies averages to other memory.
            expire_at: Schedules a call of `expire` at a time of the clock of `undelivered`.
            forget: Called with the numbers of rounds whose averages are no longer kept.
            decision: Names the gradients of each round, if the accumulator is sharded.
        """
        self.history = history
        self._undelivered = undelivered
        self._kept = kept
        self._reservation = memory.another()
        self._copies = copies
        self._expire_at = expire_at
        self._forget = forget
        self._decision = decision
        self._expiry_asked_for = False

    @property
    def nbytes(self) -> int:
        """The memory of all averages."""
        return self._reservation.used

    def of_current(self, rounds: Rounds, values: Mapping[str, Value]) -> Average:
        """Returns the average of the round that is about to end, without keeping it yet."""
        average = average_of_current(rounds, values, self._copies.host_copy(values))
        return average if self._decision is None else replace(average, parts=self._decision.parts(rounds))

    @property
    def all_kept(self) -> list[Average]:
        """All kept averages; those kept both for readers and for calls appear twice."""
        return [*self.history.all_kept, *self._undelivered.averages]

    def answered(self, average: Average, rounds: Rounds) -> Average:
        """Returns an average as a current answer; for a sharded accumulator, with what its servers may forget."""
        if average.parts is None:
            return average
        return replace(average, parts=as_of_now(average.parts, rounds, self.all_kept))

    def hold(self, average: Average, call: RequestId | None) -> bool:
        """Keeps an average that a call reads until a later call of its client, if servers have yet to compute it.

        Returns:
            False if it is no longer kept, so that servers may have forgotten its gradients.
        """
        if average.parts is None:
            return True
        number = average.round_number
        if self.history.of_round(number) is None and self._undelivered.get(number) is None:
            return False
        if call is not None:
            self._undelivered.add(average, [call])
            self._settle()
            self._ask_for_expiry()
        return True

    async def keep_again(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps an average of an earlier run of the server, whose values are on the host.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        values = await self._copies.brought(average.values)
        self.add(replace(average, values=values, host_copy=self._copies.host_copy(values)), answered)

    def add(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps the average of the round that has just ended, for readers and for the calls that it answers."""
        self.history.add(average)
        self._undelivered.add(average, answered)
        self._settle()
        self._ask_for_expiry()

    def of_round(self, ended: Round) -> Average:
        """Returns the average of a round.

        Raises:
            AbortedError: It is no longer kept.
        """
        average = self.history.of_round(ended.number) or self._undelivered.get(ended.number)
        if average is None:
            raise AbortedError(
                f"the round of this request_id ended with step {ended.step}, whose average is no longer kept",
                field="request_id",
                code="GS_REQUEST_FORGOTTEN",
            )
        return average

    def acknowledge(self, call: RequestId) -> None:
        """Releases the averages that the client has received, as this call shows."""
        if self._undelivered.acknowledge(call):
            self._settle()

    def beyond(self, step: int) -> tuple[int, ...]:
        """Returns the numbers of the rounds that led beyond a step and whose averages are kept."""
        return tuple(sorted({each.round_number for each in self.all_kept if each.step > step}))

    def step_set(self, step: int, abandoned: Collection[int]) -> None:
        """Drops the averages of abandoned rounds, and fails readers of steps that no round can lead to any more.

        Going back to an earlier step takes back what came after it: readers, stragglers and repeated calls no longer
        get these averages.
        """
        self.history.drop(abandoned)
        self._undelivered.withdraw(abandoned)
        self.history.step_set(step)
        self._settle()

    def drop(self, rounds: Collection[int]) -> None:
        """Drops the averages of rounds that readers no longer need."""
        self.history.drop(rounds)
        self._settle()

    def make_room(self) -> bool:
        """Drops the oldest average kept only for repeated calls; returns False if there is none."""
        dropped = self._undelivered.drop_oldest(self.history.rounds)
        self._settle()
        return dropped

    def expire(self, turn: Turn) -> int:
        """Releases averages of calls whose lease has ended, in one turn; returns the number of calls."""
        self._expiry_asked_for = False
        count = self._undelivered.expire(turn)
        self._settle()
        self._ask_for_expiry()
        return count

    def close(self, error: Exception) -> None:
        """Fails waiting readers, and frees the memory; what is on disk stays."""
        self.history.close(error)
        self._undelivered.clear()
        self._kept.take_dropped()
        self._settle()

    def _settle(self) -> None:
        dropped = self._kept.take_dropped()
        if dropped:
            self._forget(dropped)
        self._reservation.settle(self._kept.total)

    def _ask_for_expiry(self) -> None:
        deadline = self._undelivered.next_deadline
        if deadline is not None and not self._expiry_asked_for:
            self._expiry_asked_for = True
            self._expire_at(deadline, self)
