"""The averages of past rounds, and the readers that wait for the next ones."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from itertools import islice

from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.kept_bytes import KeptBytes
from gradserve_server.errors import OutOfRangeError

_MOST_NAMED = 20


class _Reading:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Average] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self.readers = 0


class AverageHistory:
    """The latest averages, by step, for any number of readers."""

    def __init__(self, capacity: int, kept: KeptBytes) -> None:
        """Takes the number of averages to keep, and what counts their memory."""
        self._capacity = capacity
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
    def all_kept(self) -> list[Average]:
        """The averages that are kept."""
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
        """Keeps an average in the place of the oldest, and hands it to the readers that wait for it."""
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
            OutOfRangeError: The average is not kept, or the step will never be reached.
            Exception: The error of `close`, once that was called.
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
        """Keeps the averages of rounds no more."""
        for average in [each for each in self._averages.values() if each.round_number in rounds]:
            del self._averages[average.step]
            self._forget(average)

    def step_set(self, global_step: int) -> None:
        """Ends the waits for steps that no round can lead to any more."""
        for step in [step for step in self._readings if step is not None and step <= global_step]:
            self._readings.pop(step).answer.set_exception(self._gone(step))

    def close(self, error: Exception) -> None:
        """Ends every wait with an error, later ones too, and drops the averages."""
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
            f"no average of step {step} is kept; expected one of the kept steps ({kept}) or a later step", field="step"
        )
