"""Waits for the rounds of an accumulator, and what becomes of those who give up."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from gradserve_server.accumulators.diagnosis import Diagnosis
from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.history import AverageHistory
from gradserve_server.accumulators.observer import AccumulatorObserver
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.waiting import TakeQueue, Waiter

GaveUp: TypeAlias = Callable[[Waiter], object]
"""Is told of a waiter that has left the queue without an answer."""


class Waits:
    """Lets calls wait for averages of one accumulator."""

    def __init__(self, name: str, rounds: Rounds, queue: TakeQueue, observer: AccumulatorObserver) -> None:
        """Takes what it explains failures with, and what learns of waits.

        Args:
            name: The accumulator's name.
            rounds: Its rounds.
            queue: The calls that wait for a round to end.
            observer: Learns of waits.
        """
        self._rounds = rounds
        self._queue = queue
        self._diagnosis = Diagnosis(name, rounds, queue)
        self._observer = observer

    async def until_answered(self, waiter: Waiter, timeout: float | None, gave_up: GaveUp) -> Average:
        """Waits for the answer to a waiter, for at most `timeout` seconds.

        Args:
            waiter: The waiter.
            timeout: The seconds, None for no limit.
            gave_up: See `leave`.

        Raises:
            DeadlineExceededError: There is none in time; the waiter has left the queue.
        """
        if waiter.answer.done():
            return waiter.answer.result()
        waiter.listeners += 1
        try:
            with self._observer.waiting() as wait:
                async with asyncio.timeout(timeout):
                    average = await asyncio.shield(waiter.answer)
                wait.served(average.step)
                return average
        except TimeoutError:
            if waiter.serving or waiter.answer.done():
                # Its round is ending, or has just ended; giving up now would lose the average.
                return await asyncio.shield(waiter.answer)
            raise self._diagnosis.too_few(waiter.num_required, timeout) from None
        finally:
            waiter.listeners -= 1
            self.leave(waiter, gave_up)

    async def until_read(self, history: AverageHistory, step: int | None, timeout: float | None) -> Average:
        """Waits for the average of a step, the newest one for None, for at most `timeout` seconds.

        Raises:
            OutOfRangeError: It is not kept, or no round led there.
            DeadlineExceededError: No round led there in time.
        """
        try:
            with self._observer.waiting() as wait:
                async with asyncio.timeout(timeout):
                    average = await history.read(step, self._rounds.global_step)
                wait.served(average.step)
                return average
        except TimeoutError:
            raise self._diagnosis.no_average(step, timeout) from None

    def leave(self, waiter: Waiter, gave_up: GaveUp) -> None:
        """Removes a waiter whose callers have all left from the queue, unless it is being served.

        Args:
            waiter: The waiter.
            gave_up: Called if it was removed.
        """
        if waiter.listeners == 0 and not waiter.serving and not waiter.answer.done():
            waiter.answer.cancel()
            self._queue.remove(waiter)
            gave_up(waiter)
