"""Simulates rounds: a discrete-event model of workers, links and a server.

As the model is spread evenly and workers talk to all servers at once, what happens at one server happens at all of
them at the same time. So one is simulated, whatever their number, and ten thousand workers take seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Generic, TypeVar

WIRE_EFFICIENCY = 0.95
"""The part of a link's bandwidth that is left for tensors by the headers of Ethernet, IP and TCP, in frames of 1500
bytes."""
_FASTEST = 1e15
"""Bytes a second, in place of no limit at all."""
_WARM_UP_ROUNDS = 2
"""Rounds after which workers are as much apart as they stay."""
_WORTHWHILE = 0.9
"""Twice as many servers are worth it if a round then takes at most this part of its time."""
WhoT = TypeVar("WhoT")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A training run: its workers, its servers, and the links between them.

    The model is in accumulators that are spread evenly over the servers. Links carry as much in one direction as in the
    other, at the same time.

    Attributes:
        model_bytes: The size of a gradient of the whole model.
        num_workers: The number of workers.
        num_required: The number of gradients in a round; fewer than workers if some are backups.
        num_servers: The number of servers.
        server_bandwidth: The bandwidth of each server's link, in bytes a second.
        worker_bandwidth: The bandwidth of each worker's link, in bytes a second; math.inf for no limit. With several
            workers on a host, that of the host's link.
        round_trip: The time of a round trip between workers and servers, in seconds.
        compute_seconds: The median time in which a worker computes a gradient.
        jitter: The standard deviation of the logarithm of that time: 0.1 means that one step in six takes 10 % longer.
        workers_per_host: The number of workers on each host, which share an aggregator there if there are several.
        grace: How long a gradient waits there for those of the other workers of the host, in seconds.
    """

    model_bytes: float
    num_workers: int
    num_required: int
    num_servers: int
    server_bandwidth: float
    worker_bandwidth: float = math.inf
    round_trip: float = 0.0
    compute_seconds: float = 0.0
    jitter: float = 0.0
    workers_per_host: int = 1
    grace: float = 1.0

    @property
    def part_bytes(self) -> float:
        """The size of the part of a gradient that each server gets."""
        return self.model_bytes / self.num_servers

    @property
    def capacity(self) -> float:
        """The capacity of a server's link for tensors, in bytes a second."""
        return self.server_bandwidth * WIRE_EFFICIENCY

    @property
    def transfer_limit(self) -> float:
        """The share of a worker's link for one transfer, in bytes a second: a worker talks to all servers at once."""
        return self.worker_bandwidth * WIRE_EFFICIENCY / self.num_servers


@dataclass(frozen=True)
class Choice:
    """A number of servers, and what to expect of it.

    Attributes:
        num_servers: The number of servers.
        forecast: The forecast.
    """

    num_servers: int
    forecast: Forecast


def compare(deployment: Deployment, sizes: Sequence[int]) -> list[Choice]:
    """Returns the forecasts of a deployment for several numbers of servers."""
    return [Choice(size, simulate(replace(deployment, num_servers=size))) for size in sizes]


def sizes_up_to(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and the greatest number itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def advise(choices: Sequence[Choice]) -> Choice:
    """Returns the smallest number of servers after which more of them hardly make rounds faster."""
    for choice, larger in pairwise(choices):
        if larger.forecast.round_seconds > _WORTHWHILE * choice.forecast.round_seconds:
            return choice
    return choices[-1]


@dataclass(frozen=True)
class Forecast:
    """The expected performance of a deployment.

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
    """Returns the forecast of a deployment from `num_rounds` rounds after a warm-up.

    With several workers on a host, an aggregator there sends one gradient for all of them, and receives one average;
    what is within a host takes no time.

    A worker computes, sends its gradient, waits for the average of the round, receives it, and starts again. The round
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
        """Future events other than the ends of transfers, numbered in the order in which they were decided."""
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


class Hosts:
    """The aggregators of all hosts, which forward gradients once all workers have sent theirs, or after a grace period.

    A gradient that comes after that is forwarded alone.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._num_workers = deployment.num_workers
        self._per_host = deployment.workers_per_host
        self._batches: dict[tuple[int, int], _Batch] = {}

    def add(self, worker: int, step: int) -> tuple[Group, bool, bool]:
        """Adds a gradient; returns its group, whether it is the first of it, and whether the group is complete."""
        host = worker // self._per_host
        batch = self._batches.setdefault((host, step), _Batch())
        batch.count += 1
        is_first = batch.waiting is None
        group = batch.waiting = batch.waiting or Group(step)
        group.workers.append(worker)
        is_complete = batch.count == min(self._per_host, self._num_workers - host * self._per_host)
        if is_complete:
            del self._batches[host, step]
        return group, is_first, is_complete

    def let_go(self, group: Group) -> bool:
        """Forwards a group whose grace period is over; returns False if it was already forwarded."""
        batch = self._batches.get((group.workers[0] // self._per_host, group.step))
        if batch is None or batch.waiting is not group:
            return False
        batch.waiting = None
        return True


@dataclass(eq=False)
class Group:
    """Workers whose gradients travel as one, and get one average.

    Attributes:
        step: The step of the gradients.
        workers: The workers.
    """

    step: int
    workers: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Batch:
    """The gradients of one step at an aggregator.

    Attributes:
        count: The gradients that have come.
        waiting: Those that wait for others; None if none does.
    """

    count: int = 0
    waiting: Group | None = None


class SharedLink(Generic[WhoT]):
    """One direction of a link, whose transfers are of one size and get equal parts of it (processor sharing).

    All transfers under way have the same rate, so they end in the order in which they began.
    """

    def __init__(self, num_bytes: float, capacity: float, limit: float) -> None:
        self._num_bytes = num_bytes
        self._capacity = min(capacity, _FASTEST)
        self._limit = limit
        self._now = 0.0
        self._served = 0.0
        """The bytes that a transfer would have got which has been under way from the start."""
        self._ends: deque[tuple[float, WhoT]] = deque()

    def begin(self, now: float, who: WhoT) -> None:
        """Begins a transfer of somebody."""
        self._advance(now)
        self._ends.append((self._served + self._num_bytes, who))

    @property
    def next_end(self) -> float:
        """The time at which the next transfer ends if none begins before; math.inf without any."""
        return self._now + max(self._ends[0][0] - self._served, 0.0) / self._rate if self._ends else math.inf

    def end(self, now: float) -> WhoT:
        """Ends the next transfer; returns whose it was."""
        self._advance(now)
        return self._ends.popleft()[1]

    @property
    def _rate(self) -> float:
        return min(self._limit, self._capacity / len(self._ends))

    def _advance(self, now: float) -> None:
        if self._ends:
            self._served += (now - self._now) * self._rate
        self._now = now
