"""Simulates rounds: a discrete-event model of workers, links and a server.

As the model is spread evenly and workers talk to all servers at once, what happens at one server happens at all of
them at the same time. So one is simulated, whatever their number, and ten thousand workers take seconds.
"""

import heapq
import math
import random
from dataclasses import dataclass

from gradserve_server.planning.deployment import Deployment
from gradserve_server.planning.shared_link import SharedLink

_WARM_UP_ROUNDS = 2
"""Rounds after which workers are as much apart as they stay."""


@dataclass(frozen=True)
class Forecast:
    """What a deployment can be expected to do.

    Attributes:
        round_seconds: The mean time from one round's end to the next one's.
        computing: The part of their time that workers compute, of those gradients that count.
        stale: The part of the gradients that came too late to count.
        server_bytes: The bytes that each server receives in a round; it sends as many.
    """

    round_seconds: float
    computing: float
    stale: float
    server_bytes: float


def simulate(deployment: Deployment, num_rounds: int = 20, seed: int = 0) -> Forecast:
    """Returns the forecast of a deployment from so many rounds, after some that do not count.

    A worker computes, sends its gradient, waits for the average of the round, receives it, and begins anew. The round
    ends when enough gradients are in. A gradient for a round that has ended is dropped, and its worker gets the newest
    average at once.
    """
    return _Simulation(deployment, seed).run(num_rounds)


class _Simulation:
    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._of = deployment
        self._random = random.Random(seed)
        link = (deployment.part_bytes, deployment.capacity, deployment.transfer_limit)
        self._up, self._down = SharedLink(*link), SharedLink(*link)
        self._ready: list[tuple[float, int, bool]] = []
        """When a worker next begins to send (True) or to receive (False)."""
        self._steps = [0] * deployment.num_workers
        self._waiting: list[int] = []
        self._step = 0
        self._ends: list[float] = []
        self._num_counted = self._num_stale = 0

    def run(self, num_rounds: int) -> Forecast:
        for worker in range(self._of.num_workers):
            self._compute(0.0, worker)
        while len(self._ends) < _WARM_UP_ROUNDS + num_rounds:
            ready = self._ready[0][0] if self._ready else math.inf
            now = min(ready, self._up.next_end, self._down.next_end)
            if now == ready:
                _, worker, sends = heapq.heappop(self._ready)
                (self._up if sends else self._down).begin(now, worker)
            elif now == self._up.next_end:
                self._arrive(now, self._up.end(now))
            else:
                worker = self._down.end(now)
                self._compute(now + self._of.round_trip / 2, worker)
        seconds = self._ends[-1] - self._ends[_WARM_UP_ROUNDS - 1]
        per_round = seconds / num_rounds
        computing = self._of.num_required * self._mean_compute / (self._of.num_workers * per_round)
        num_sent = self._num_counted + self._num_stale
        return Forecast(
            round_seconds=per_round,
            computing=min(computing, 1.0),
            stale=self._num_stale / num_sent,
            server_bytes=self._of.part_bytes * num_sent / len(self._ends),
        )

    @property
    def _mean_compute(self) -> float:
        return self._of.compute_seconds * math.exp(self._of.jitter**2 / 2)

    def _compute(self, now: float, worker: int) -> None:
        self._steps[worker] = self._step
        seconds = self._of.compute_seconds * math.exp(self._random.gauss(0.0, self._of.jitter))
        heapq.heappush(self._ready, (now + seconds + self._of.round_trip / 2, worker, True))

    def _arrive(self, now: float, worker: int) -> None:
        if self._steps[worker] < self._step:
            self._num_stale += 1
            self._answer(now, worker)
            return
        self._num_counted += 1
        self._waiting.append(worker)
        if len(self._waiting) == self._of.num_required:
            self._step += 1
            self._ends.append(now)
            for each in self._waiting:
                self._answer(now, each)
            self._waiting.clear()

    def _answer(self, now: float, worker: int) -> None:
        heapq.heappush(self._ready, (now, worker, False))
