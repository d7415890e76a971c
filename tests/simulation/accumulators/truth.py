"""What was sent, answered and seen, and what has to follow from it, whatever crashed."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, Contribution
from gradserve_server.accumulators.rounds import Applied, Outcome
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.simulation.accumulators.gradients import bits_of, has_noise_of, members_of
from tests.simulation.promises import check


@dataclass(eq=False)
class Call:
    """A call of a client, however often it was sent.

    Attributes:
        kind: What it asks for.
        client: The client.
        sequence: Its number.
        life: The accumulator that it was sent to.
        number: Its gradient; None for a take.
        contribution: What it says of the gradient.
        num_required: The gradients that it waits for.
        outcome: The latest answer to its gradient.
        average: The number of the round that answered it.
        epoch: The number of crashes before the latest answer.
        is_given_up: Whether the client has forgotten it; copies of it may still be on their way.
    """

    kind: str
    client: str
    sequence: int
    life: "Life"
    number: int | None
    contribution: Contribution
    num_required: int
    outcome: Applied | None = None
    average: int | None = None
    epoch: int = -1
    is_given_up: bool = False
    later: set[int] = field(default_factory=set)
    """The calls that the server may remember in its place."""

    @property
    def is_answered(self) -> bool:
        return self.epoch >= 0

    def __str__(self) -> str:
        what = "" if self.number is None else f" of g{self.number}"
        return f"{self.kind} {self.client}:{self.sequence}{what}"


@dataclass(eq=False)
class Life:
    """One accumulator from its creation to its deletion.

    Attributes:
        is_promised: Whether its creation was answered.
        deleting: Whether somebody asked for its deletion.
        is_deleted: Whether that was answered.
        ended_at: When the server deleted it, by the clock of the world; None if it has not in this epoch.
        averages: What was seen of each round: the bits and all else.
        where: The round in which each gradient was seen.
        setting: The steps that are being set.
        step: The step that was last seen.
        round: The round that was last seen to be the current one.
    """

    key: ResourceKey
    incarnation: str
    durability: Durability
    sparse: bool
    deterministic: bool
    is_promised: bool = False
    deleting: bool = False
    is_deleted: bool = False
    calls: list[Call] = field(default_factory=list)
    averages: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    first_seen: dict[int, int] = field(default_factory=dict)
    where: dict[int, int] = field(default_factory=dict)
    members: dict[int, set[int]] = field(default_factory=dict)
    setting: list[int] = field(default_factory=list)
    sets_unseen: list[int] = field(default_factory=list)
    abandoned: set[int] = field(default_factory=set)
    step: int = 0
    round: int = 0
    kept: tuple[int, ...] = ()
    newest: Average | None = None
    ended_at: float | None = None
    waiting_for_additions: "list[asyncio.Future[None]]" = field(default_factory=list)

    async def until_something_is_added(self, seconds: float) -> None:
        """Returns while a gradient is being added, or after a while."""
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting_for_additions.append(begins)
        try:
            await asyncio.wait([begins], timeout=seconds)
        finally:
            self.waiting_for_additions.remove(begins)

    def something_is_added(self) -> None:
        """Notes that a gradient is about to be added."""
        for each in self.waiting_for_additions:
            if not each.done():
                each.set_result(None)

    def sets(self, step: int) -> None:
        """Notes that somebody is about to set the step: averages of later ones may go."""
        self.setting.append(step)
        self.sets_unseen.append(step)
        self.abandoned |= {number for number, (led_to, *_) in self.averages.items() if step < led_to}

    def observe(self, accumulator: Accumulator, epoch: int) -> None:
        """Looks at everything that anybody could see now."""
        rounds, history = accumulator._ledger.rounds, accumulator._averages.history
        current, step = rounds.current.number, rounds.global_step
        newest = history.newest()
        if (current, step) == (self.round, self.step) and newest is self.newest:
            return
        self.newest = newest
        check(current in (self.round, self.round + 1), f"{self.key}: round {current} follows {self.round}")
        if (current, step) != (self.round, self.step):
            starts = [self.step, *self.setting]
            allowed = starts if current == self.round else [*(each + 1 for each in starts), *self.setting]
            check(step in allowed, f"{self.key}: the step went from {self.step} to {step}, expected {allowed}")
            self.round, self.step = current, step
        for kept_step in history.steps:
            average = history.get(kept_step)
            assert average is not None
            self.see(average, epoch)
        steps = [*history.steps, step]
        in_order = steps == sorted(steps) and len(set(history.steps)) == len(history.steps)
        check(in_order, f"{self.key}: averages of steps {history.steps} are kept at step {step}: some were abandoned")
        is_abandoned = current - 1 in self.abandoned or (current - 1 not in self.averages and bool(self.sets_unseen))
        if current and not is_abandoned:
            check(newest is not None, f"{self.key}: the average of round {current - 1} is gone")
            assert newest is not None
            check(newest.round_number == current - 1, f"{self.key}: round {current - 1} ended without an average")
        self.sets_unseen = list(self.setting)
        self.kept = history.steps

    def see(self, average: Average, epoch: int) -> None:
        """Looks at an average."""
        number = average.round_number
        seen = (average.step, average.num_gradients, average.total_weight, average.worker_ids)
        found = (*seen, bits_of(average.arrays))
        if number in self.averages:
            check(found == self.averages[number], f"{self.key}: the average of round {number} has changed")
            return
        self.averages[number], self.first_seen[number] = found, epoch
        if any(step < average.step for step in self.setting):
            self.abandoned.add(number)
        counts = members_of(average)
        for gradient, count in counts.items():
            check(count == 1, f"{self.key}: g{gradient} is {count:g} times in round {number}")
            sent = any(each.number == gradient for each in self.calls)
            check(sent, f"{self.key}: g{gradient} is in round {number}, but nobody sent it")
            before = self.where.setdefault(gradient, number)
            check(before == number, f"{self.key}: g{gradient} is in rounds {before} and {number}")
        said = average.num_gradients
        check(len(counts) == said, f"{self.key}: round {number} has {sorted(counts)}, but says {said}")
        self.members[number] = set(counts)
        for call in self.calls:
            self._check_member(call)
        self._check_order(average, set(counts))

    def _check_order(self, average: Average, members: set[int]) -> None:
        """Checks the bits of a sum, if the order of its members is known."""
        calls = [each for each in self.calls if each.number in members and each.outcome is not None]
        calls = [each for each in calls if each.outcome and each.outcome.outcome is Outcome.ACCEPTED]
        if len(calls) != len(members):
            return
        if self.deterministic:
            calls.sort(key=lambda each: (each.contribution.worker_id, each.contribution.sequence))
        else:
            calls.sort(key=lambda each: each.outcome.num_accumulated if each.outcome else 0)
            places = [each.outcome.num_accumulated for each in calls if each.outcome]
            if self.durability is Durability.ROUND and places != list(range(1, len(calls) + 1)):
                return  # Some answers are of a round that was lost.
            check(places == list(range(1, len(calls) + 1)), f"{self.key}: the members of a round are {places}")
        numbers = [each.number for each in calls if each.number is not None]
        check(has_noise_of(average, numbers), f"{self.key}: round {average.round_number} has other bits than {numbers}")

    def note_sent(self, call: Call, epoch: int) -> None:
        """Notes that a call is sent: unless the server knows its answer, it may forget others for it.

        A call that was sent before, but may arrive later, counts as a later one, too.
        """
        for each in self.calls:
            if each is not call and each.client == call.client:
                if not self._is_known(call, epoch):
                    each.later.add(call.sequence)
                if not self._is_known(each, epoch):
                    call.later.add(each.sequence)

    def _is_known(self, call: Call, epoch: int) -> bool:
        return call.is_answered and self.is_kept(call, epoch)

    def must_remember(self, call: Call, window: int) -> bool:
        """Returns True if a call cannot have been forgotten for later ones of its client."""
        return len(call.later) < window and not call.is_given_up

    def is_kept(self, call: Call, epoch: int) -> bool:
        """Returns True if the latest answer to a call has to be there still."""
        if call.epoch == epoch or call.kind == "take":
            return True
        assert call.outcome is not None
        if call.outcome.outcome is not Outcome.ACCEPTED:
            return False
        if self.durability is Durability.GRADIENT:
            return True
        ended = self.where.get(call.number) if call.number is not None else None
        return ended is not None and self.first_seen[ended] == call.epoch

    def answered(self, call: Call, outcome: Applied | None, average: Average | None, epoch: int) -> None:
        """Notes the answer to a call."""
        if average is not None:
            self.see(average, epoch)
        if call.is_answered and self.is_kept(call, epoch):
            check(
                _told(outcome) == _told(call.outcome), f"{call}: expected {_told(call.outcome)}, got {_told(outcome)}"
            )
            if average is not None and call.average is not None and (outcome is None or outcome.round is not None):
                got, expected = average.round_number, call.average
                check(got == expected, f"{call}: expected the average of round {expected} again, got {got}")
        call.outcome, call.epoch = outcome, epoch
        call.average = None if average is None else average.round_number
        if outcome is not None and outcome.round is not None and average is not None:
            joined, got = outcome.round.number, average.round_number
            check(got == joined, f"{call}: is in round {joined}, got the average of round {got}")
        self._check_member(call)

    def _check_member(self, call: Call) -> None:
        """Checks that a gradient that was said to count does, if its round has ended."""
        outcome = call.outcome
        if outcome is None or outcome.round is None or outcome.outcome is not Outcome.ACCEPTED or call.number is None:
            if outcome is not None and outcome.outcome is Outcome.STALE and call.number in self.where:
                ended = self.where[call.number]
                check(self.first_seen[ended] != call.epoch, f"{call}: was stale, but is in round {ended}")
            return
        number = outcome.round.number
        is_promised = self.durability is Durability.GRADIENT or self.first_seen.get(number) == call.epoch
        if number in self.members and is_promised:
            check(
                call.number in self.members[number],
                f"{call}: was accepted, but is not in the average of round {number}",
            )

    def check_counted(self, call: Call) -> None:
        """Checks, when all rounds have ended, that a gradient that was accepted is in an average."""
        outcome = call.outcome
        if outcome is None or outcome.outcome is not Outcome.ACCEPTED or self.durability is not Durability.GRADIENT:
            return
        check(call.number in self.where, f"{call}: was accepted, and is in no average")

    def recovered(self, accumulator: Accumulator, epoch: int) -> None:
        """Looks at what the next server has found."""
        round_before, kept_before = self.round, self.kept
        self.observe(accumulator, epoch)
        if self.round == round_before:
            allowed = [kept_before, *[tuple([each for each in kept_before if each <= step]) for step in self.setting]]
            # Those that were kept for calls alone may take the places of those that were abandoned.
            has_more = bool(self.abandoned) and any(set(each) <= set(self.kept) for each in allowed)
            is_there = self.kept in allowed or has_more
            check(is_there, f"{self.key}: expected averages {kept_before} after the crash, got {self.kept}")
        if self.durability is Durability.GRADIENT:
            numbers = {
                each.number
                for each in self.calls
                if each.outcome is not None
                and each.outcome.outcome is Outcome.ACCEPTED
                and each.outcome.round is not None
                and each.outcome.round.number == self.round
            }
            there = accumulator.num_accumulated
            check(
                there >= len(numbers),
                f"{self.key}: {sorted(map(str, numbers))} were accepted, but only {there} are there",
            )


def _told(outcome: Applied | None) -> tuple[Any, ...] | None:
    if outcome is None:
        return None
    joined = None if outcome.round is None else outcome.round.number
    return outcome.outcome.name, joined, outcome.global_step, outcome.num_accumulated
