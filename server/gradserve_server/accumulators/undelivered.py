"""Averages that may not have reached the calls they answered."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.kept_bytes import KeptBytes
from gradserve_server.runtime.timing import Turn


@dataclass
class _Held:
    average: Average
    calls: dict[tuple[str, int], None] = field(default_factory=dict)
    is_withdrawn: bool = False


class UndeliveredAverages:
    """Keeps the average of a round until the calls it answered have received it.

    A reply can be lost, and its call sent again. So an average is kept until a later call of the same client shows that
    the answer arrived, or until its lease ends.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float], kept: KeptBytes) -> None:
        """Takes a monotonic `clock` in seconds, and what counts the memory of averages."""
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
        """The averages that are kept."""
        return [held.average for held in self._rounds.values()]

    def get(self, round_number: int) -> Average | None:
        """Returns the average of a round, None if it is not kept, or was withdrawn."""
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
        received = [each for each in self._by_client.get(call.client_id, ()) if call.acknowledges(each)]
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
        """Drops the oldest average, without the rounds in `besides`; returns False if there is none."""
        oldest = next((number for number in self._rounds if number not in besides), None)
        if oldest is None:
            return False
        for key in list(self._rounds[oldest].calls):
            self._release(*key)
        return True

    def withdraw(self, rounds: Iterable[int]) -> None:
        """Answers no more calls with the averages of rounds.

        Those of a sharded accumulator are kept all the same: answers that were given before say what they are to be
        computed of, and servers forget that when they are kept no longer.
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
