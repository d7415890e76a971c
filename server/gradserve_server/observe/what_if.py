"""Replays of rounds from recorded arrivals: what if fewer gradients ended a round, or late ones were given a grace.

From the last rounds follows how long each worker took from the beginning of its step to the arrival of its gradient. A
replay lets the workers go on with these times, each in its own order, under other rules for the end of a round.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradserve_protocol.server_status import RoundStatus

FEWEST_ROUNDS = 5
"""The fewest rounds of which a replay says anything."""
_MOST_ARRIVALS = 3_000
_MOST_ROUNDS = 60
_WARM_UP_ROUNDS = 3
"""Rounds after which workers are as much apart as they stay."""
_WORTHWHILE = 1.1
"""Rules under which this many times as many gradients count are better ones."""
_SHORT_GRACE = 0.1
"""A grace, as a part of the time of a round."""


@dataclass(frozen=True)
class Alternative:
    """The outcome of a replay under other rules.

    Attributes:
        num_required: The gradients that end a round, or begin its grace.
        grace: Seconds that a round with enough gradients waits for the rest of the workers.
        seconds: The time from the end of a round to that of the next.
        late: The part of all gradients that come after the end of their round.
        per_second: The gradients that count, per second.
    """

    num_required: int
    grace: float
    seconds: float
    late: float
    per_second: float


@dataclass(frozen=True)
class WhatIf:
    """The last rounds, and what they would have been.

    Attributes:
        num_rounds: The number of rounds that the times of workers are taken from.
        num_workers: The workers in them.
        seconds: The time from the end of a round to that of the next, as recorded.
        as_required: A replay with the number of gradients that was required: how good replays are.
        alternatives: Replays with other rules, most gradients first.
        better: The alternative under which most gradients count, if a tenth more do; otherwise None.
    """

    num_rounds: int
    num_workers: int
    seconds: float
    as_required: Alternative
    alternatives: tuple[Alternative, ...]
    better: Alternative | None


def what_if(rounds: Sequence[RoundStatus], *, has_grace: bool = False) -> WhatIf | None:
    """Replays rounds.

    Args:
        rounds: The last rounds of an accumulator or of parameters, oldest first; those that are open do not count.
        has_grace: Whether rounds can be given a grace, as those of parameters can.

    Returns:
        What they would have been; None if they are too few, or of fewer than two workers with ids.
    """
    ended = [each for each in rounds if each.ended]
    times = times_of_workers(ended)
    if len(ended) < FEWEST_ROUNDS or len(times) < 2:
        return None
    required = min(ended[-1].num_required, len(times))
    seconds = (ended[-1].ended - ended[0].ended) / (len(ended) - 1)
    numbers = _numbers(required, len(times))
    rules = [(number, 0.0) for number in numbers]
    if has_grace:
        rules += [(number, _SHORT_GRACE * seconds) for number in numbers if number < len(times)]
    as_required = replay(times, required)
    alternatives = tuple(replay(times, number, grace) for number, grace in sorted(rules, reverse=True))
    best = max(alternatives, key=lambda each: each.per_second, default=as_required)
    return WhatIf(
        num_rounds=len(ended),
        num_workers=len(times),
        seconds=seconds,
        as_required=as_required,
        alternatives=alternatives,
        better=best if best.per_second >= _WORTHWHILE * as_required.per_second and best is not as_required else None,
    )


def times_of_workers(rounds: Sequence[RoundStatus]) -> Mapping[str, Sequence[float]]:
    """Returns how many seconds each worker took for each of its gradients, by its id.

    A worker begins when the round before has ended, or when its own gradient before that arrived, if it was late.
    """
    found = defaultdict[str, list[float]](list)
    latest: dict[str, float] = {}
    for before, each in pairwise(rounds):
        for arrival in each.arrivals:
            if not arrival.worker_id:
                continue
            at = each.began + arrival.after
            if each.step == before.step + 1:
                begun = max(before.ended, latest.get(arrival.worker_id, 0.0))
                found[arrival.worker_id].append(max(at - begun, 0.0))
            latest[arrival.worker_id] = at
    return found


def _numbers(required: int, num_workers: int) -> Sequence[int]:
    """Returns numbers of gradients to try in place of that which was required, within what the workers can give."""
    wanted = {required + 1, required - 1, required - 2, num_workers // 2 + 1} - {required}
    return sorted(number for number in wanted if 1 <= number <= num_workers)


def replay(times: Mapping[str, Sequence[float]], num_required: int, grace: float = 0.0) -> Alternative:
    """Returns what rounds would be if workers took these times again and again.

    A worker whose gradient is late begins again at once, from the newest step.

    Args:
        times: The seconds that each worker takes for its gradients; one at least.
        num_required: The gradients that end a round, at most as many as there are workers.
        grace: Seconds that it then waits for the others.
    """
    if not 1 <= num_required <= len(times):
        raise ValueError(f"expected num_required from 1 to {len(times)}, the number of workers, got {num_required}")
    cycles = [itertools.cycle(each) for each in times.values()]
    num_rounds = max(2 * _WARM_UP_ROUNDS, min(_MOST_ROUNDS, _MOST_ARRIVALS // len(times)))
    ends, num_counted, num_late = list[float](), 0, 0
    for end, counted, late in itertools.islice(_rounds(cycles, num_required, grace), num_rounds):
        if len(ends) >= _WARM_UP_ROUNDS:
            num_counted += counted
            num_late += late
        ends.append(end)
    begun = ends[_WARM_UP_ROUNDS - 1]
    seconds = (ends[-1] - begun) / (num_rounds - _WARM_UP_ROUNDS)
    return Alternative(
        num_required=num_required,
        grace=grace,
        seconds=seconds,
        late=num_late / (num_counted + num_late),
        per_second=num_counted / max(ends[-1] - begun, 1e-9),
    )


def _rounds(cycles: Sequence[Iterator[float]], num_required: int, grace: float) -> Iterator[tuple[float, int, int]]:
    """Yields when each round ends, how many gradients it has, and how many have come late since the one before."""
    arrivals = [(next(cycle), worker, 0) for worker, cycle in enumerate(cycles)]
    heapq.heapify(arrivals)
    for step in itertools.count():
        came, num_late, end = list[int](), 0, float("inf")
        while len(came) < len(cycles) and arrivals[0][0] <= end:
            now, worker, of_step = heapq.heappop(arrivals)
            if of_step < step:
                num_late += 1
                heapq.heappush(arrivals, (now + next(cycles[worker]), worker, step))
                continue
            came.append(worker)
            if len(came) == num_required:
                end = now + grace
            if len(came) == len(cycles):
                end = now
                break
        for worker in came:
            heapq.heappush(arrivals, (end + next(cycles[worker]), worker, step + 1))
        yield end, len(came), num_late
