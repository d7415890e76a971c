"""Simulates rounds: a discrete-event model of workers, links and a server.

As the model is spread evenly and workers talk to all servers at once, what happens at one server happens at all of
them at the same time. So one is simulated, whatever their number, and ten thousand workers take seconds.
"""

import heapq
import itertools
import math
import random
from dataclasses import dataclass
from enum import Enum

from gradserve_server.planning.deployment import Deployment
from gradserve_server.planning.hosts import Group, Hosts
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

    With several workers on a host, an aggregator there sends one gradient for all of them, and receives one average;
    what is within a host takes no time.

    A worker computes, sends its gradient, waits for the average of the round, receives it, and begins anew. The round
    ends when enough gradients are in. A gradient for a round that has ended is dropped, and its worker gets the newest
    average at once.
    """
    return _Simulation(deployment, seed).run(num_rounds)


class _Event(Enum):
    COMPUTED = "a worker has its gradient"
    GRACE_ENDS = "an aggregator waits no longer"
    SENDS = "a gradient begins to travel"
    RECEIVES = "an average begins to travel"


class _Simulation:
    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._of = deployment
        self._random = random.Random(seed)
        link = (deployment.part_bytes, deployment.capacity, deployment.transfer_limit)
        self._up, self._down = SharedLink[Group](*link), SharedLink[Group](*link)
        self._hosts = Hosts(deployment)
        self._events: list[tuple[float, int, _Event, Group]] = []
        """What happens next beside the ends of transfers, with numbers in the order in which it was decided."""
        self._numbers = itertools.count()
        self._waiting: list[Group] = []
        self._step = 0
        self._ends: list[float] = []
        self._num_in_round = self._num_counted = self._num_stale = self._num_sent = 0

    def run(self, num_rounds: int) -> Forecast:
        for worker in range(self._of.num_workers):
            self._compute(0.0, worker)
        while len(self._ends) < _WARM_UP_ROUNDS + num_rounds:
            happens = self._events[0][0] if self._events else math.inf
            now = min(happens, self._up.next_end, self._down.next_end)
            if now == happens:
                _, _, event, group = heapq.heappop(self._events)
                self._happen(now, event, group)
            elif now == self._up.next_end:
                self._arrive(now, self._up.end(now))
            else:
                for worker in self._down.end(now).workers:
                    self._compute(now + self._of.round_trip / 2, worker)
        seconds = self._ends[-1] - self._ends[_WARM_UP_ROUNDS - 1]
        per_round = seconds / num_rounds
        computing = self._of.num_required * self._mean_compute / (self._of.num_workers * per_round)
        return Forecast(
            round_seconds=per_round,
            computing=min(computing, 1.0),
            stale=self._num_stale / (self._num_counted + self._num_stale),
            server_bytes=self._of.part_bytes * self._num_sent / len(self._ends),
        )

    @property
    def _mean_compute(self) -> float:
        return self._of.compute_seconds * math.exp(self._of.jitter**2 / 2)

    def _after(self, time: float, event: _Event, group: Group) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event, group))

    def _happen(self, now: float, event: _Event, group: Group) -> None:
        match event:
            case _Event.COMPUTED:
                self._collect(now, group)
            case _Event.GRACE_ENDS:
                if self._hosts.let_go(group):
                    self._send(now, group)
            case _Event.SENDS:
                self._up.begin(now, group)
            case _Event.RECEIVES:
                self._down.begin(now, group)

    def _compute(self, now: float, worker: int) -> None:
        seconds = self._of.compute_seconds * math.exp(self._random.gauss(0.0, self._of.jitter))
        self._after(now + seconds, _Event.COMPUTED, Group(self._step, [worker]))

    def _collect(self, now: float, computed: Group) -> None:
        """Takes a gradient to the aggregator of its host."""
        group, is_first, is_complete = self._hosts.add(computed.workers[0], computed.step)
        if is_complete:
            self._send(now, group)
        elif is_first:
            self._after(now + self._of.grace, _Event.GRACE_ENDS, group)

    def _send(self, now: float, group: Group) -> None:
        self._after(now + self._of.round_trip / 2, _Event.SENDS, group)

    def _arrive(self, now: float, group: Group) -> None:
        self._num_sent += 1
        if group.step < self._step:
            self._num_stale += len(group.workers)
            self._after(now, _Event.RECEIVES, group)
            return
        self._num_counted += len(group.workers)
        self._num_in_round += len(group.workers)
        self._waiting.append(group)
        if self._num_in_round >= self._of.num_required:
            self._step += 1
            self._num_in_round = 0
            self._ends.append(now)
            for each in self._waiting:
                self._after(now, _Event.RECEIVES, each)
            self._waiting.clear()
