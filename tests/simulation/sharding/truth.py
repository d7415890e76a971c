"""What was sent, decided and answered, and what has to follow from it, whatever failed."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.calls.identity import CallId
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.sharding.home import part_id
from tests.simulation.promises import check

SHAPES = {"first": (211, 2), "second": (64, 3), "third": (5,)}
"""The components; the first two are divided among the servers."""


@lru_cache(1000)
def gradient_of(number: int) -> dict[str, NDArray[np.float32]]:
    """Returns a gradient whose sums with others tell by their bits what was added, in which order."""
    generator = np.random.default_rng(number)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Decision:
    """What the home has said of a round."""

    ids: tuple[str, ...]
    weights: tuple[float, ...]
    step: int
    worker_ids: tuple[str, ...]


@dataclass
class Life:
    """One accumulator at its home, from its creation to its end.

    Attributes:
        decisions: What was decided, by the number of the round.
        rounds: The round of each gradient, by the id of its parts.
        accepted: The gradients that a client was told are accepted, and whether any of these answers promised it for
            longer than the server's life.
        num_kills: How many servers had been killed before.
        oldest: The oldest round that the home has said it keeps, when it said that last.
    """

    deterministic: bool
    num_kills: int = 0
    oldest: int = 0
    decisions: dict[int, Decision] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)


class Truth:
    """All that happened in one world.

    Attributes:
        lives: The accumulators, by incarnation.
        numbers: The gradients, by the ids of their parts.
        workers: The worker of each gradient, and the number of its call, likewise.
        num_averages: How many averages were looked at.
        num_kills: How many servers have been killed.
    """

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.numbers: dict[str, int] = {}
        self.workers: dict[str, tuple[str, int]] = {}
        self.num_averages = self.num_kills = 0

    @property
    def num_rounds(self) -> int:
        """The number of rounds that have ended."""
        return sum(len(each.decisions) for each in self.lives.values())

    def will_send(self, call: CallId, worker: str, number: int) -> None:
        """Notes which gradient a call sends."""
        key = part_id(RequestId(call.client_id, call.sequence, b""))
        self.numbers[key], self.workers[key] = number, (worker, call.sequence)

    def sent(self, method: str, request: Any) -> None:
        """Notes what a client tells a server of a round: it must be what the home has said."""
        if method == "ReduceGradients":
            self.see(request.average)

    def answered(self, method: str, request: Any, reply: Any) -> None:
        """Notes an answer that has arrived."""
        if method in ("ApplyGradient", "PushPull") and reply.outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
            call = request.request_id
            key = part_id(RequestId(call.client_id, call.sequence, b""))
            self.lives[request.accumulator.incarnation].accepted.add(key)
        if method in ("PushPull", "TakeGradient", "ReadAverage") and reply.HasField("average"):
            self.see(reply.average)

    def see(self, average: accumulator_pb2.Average) -> None:
        """Looks at what a home has said of a round."""
        parts = average.parts
        ids = tuple([each.hex() for each in parts.part_ids])
        decision = Decision(ids, tuple(parts.weights), average.step, tuple(average.worker_ids))
        self.decided(parts.home_incarnation, average.round - 1, decision)
        life = self.lives[parts.home_incarnation]
        life.oldest = max(life.oldest, parts.oldest_round - 1)

    def observe(self, run: Any) -> None:
        """Looks at all rounds that a server keeps as the home of accumulators."""
        for accumulator in run.accumulators():
            spec = accumulator.spec
            history = accumulator._averages.history
            newest = history.newest()
            life = self.lives.setdefault(accumulator.incarnation, Life(spec.deterministic, self.num_kills))
            if newest is None or newest.round_number in life.decisions:
                continue
            for step in history.steps:
                each = history.get(step)
                if each.parts is not None:
                    decision = Decision(each.parts.ids, each.parts.weights, each.step, each.worker_ids)
                    self.decided(accumulator.incarnation, each.round_number, decision)

    def check_reducible(self, home: Any, run: Any, names: Sequence[str], *, is_durable: Callable[[str], bool]) -> None:
        """Checks that a server can reduce all rounds that a home keeps, unless it has lost them with its memory."""
        there = {each.incarnation: each.shard for each in run.accumulators() if each.shard is not None}
        for accumulator in home.at_home():
            name, incarnation = accumulator.name.removeprefix("default/"), accumulator.incarnation
            life = self.lives.get(incarnation)
            if name not in names or incarnation not in there or life is None:
                continue
            if life.num_kills != self.num_kills and not is_durable(name):
                continue
            shard = there[incarnation]
            for member in accumulator.rounds.members.held:
                check(
                    PartKey(incarnation, member.part) in shard._parts,
                    f"server {home.place.index} has counted g{self.numbers[member.part]} in {name}, and server "
                    f"{run.place.index} does not have it",
                )
            history, undelivered = accumulator._averages.history, accumulator._averages._undelivered
            kept = {each.round_number: each for each in undelivered.averages}
            kept |= {number: history.of_round(number) for number in history.rounds}
            for number, each in kept.items():
                if number < life.oldest and (incarnation, number) in home.restored:
                    continue  # an earlier run has said that it is over, and was killed before that was on disk
                held = [PartKey(incarnation, part_id) in shard._parts for part_id in each.parts.ids]
                check(
                    number in shard._reduced or all(held),
                    f"server {home.place.index} keeps round {number} of {name}, and server {run.place.index} has "
                    f"{sum(held)} of its {len(held)} gradients",
                )

    def check_withdrawn(self, request: Any, run: Any) -> None:
        """Checks that a server that has answered a request no longer holds the gradients that it withdraws."""
        gone = [
            PartKey(request.home_incarnation, part_id(RequestId(request.request_id.client_id, sequence)))
            for sequence in request.withdrawn
        ]
        for each in () if run is None else run.accumulators():
            if each.shard is not None:
                held = [key for key in gone if key in each.shard._parts]
                check(not held, f"server {run.place.index} holds {held}, which their client has withdrawn")

    def decided(self, incarnation: str, number: int, decision: Decision) -> None:
        """Checks that a round has the members that it had before, of which none is in another round."""
        life = self.lives[incarnation]
        known = life.decisions.setdefault(number, decision)
        check(known == decision, f"round {number} of {incarnation} was {known}, and is {decision}")
        for each in decision.ids:
            check(each in self.numbers, f"round {number} has gradient {each}, which nobody sent")
            before = life.rounds.setdefault(each, number)
            check(before == number, f"g{self.numbers[each]} is in rounds {before} and {number} of {incarnation}")
        if life.deterministic:
            workers = [self.workers[each] for each in decision.ids]
            check(workers == sorted(workers), f"round {number} is summed in the order {workers}")

    def check_average(self, decided: accumulator_pb2.Average, gradients: Any) -> None:
        """Checks the bits of an average that a client got, by what the home has said of it."""
        self.num_averages += 1
        numbers = [self.numbers[each.hex()] for each in decided.parts.part_ids]
        for name, found in gradients.items():
            expected = expected_average(numbers, decided.parts.weights, name)
            check(
                found.dtype == np.float32 and found.tobytes() == expected.tobytes(),
                f"round {decided.round - 1}: {name} is not the average of {numbers}",
            )

    def check_counted(self, incarnation: str) -> None:
        """Checks, when all rounds have ended, that all gradients that were accepted are in one."""
        life = self.lives[incarnation]
        for each in life.accepted:
            check(each in life.rounds, f"g{self.numbers[each]} was accepted, and is in no average")


def expected_average(numbers: Sequence[int], weights: Sequence[float], name: str) -> NDArray[Any]:
    """Returns the weighted mean of a component of gradients, added up in this order, as one server does it."""
    total = None
    for number, weight in zip(numbers, weights, strict=True):
        term = gradient_of(number)[name] * np.float32(weight)
        total = term if total is None else total + term
    assert total is not None
    mean: NDArray[Any] = total / np.float32(reduce(operator.add, weights))
    return mean
