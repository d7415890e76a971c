"""The calls of parameters: their requests, their answers, and what has to follow from them."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import Outcome, Pushed
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.round_rules import ConstantDiscount, ExponentialDiscount
from gradserve_server.parameters.variables import Loaded
from gradserve_server.parameters.versions import Version
from gradserve_server.storage.journal import Durability
from tests.simulation.parameters.updates import weight_of
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.parameters.truth import Life


@dataclass(eq=False)
class Call:
    """A push, a push_pull, a change or a load of a client, however often it was sent.

    Attributes:
        kind: What it asks for.
        client: The client.
        sequence: Its number.
        life: The parameters that it was sent to.
        number: Its update; None for a change.
        contribution: What it says of the update.
        changes: What it changes; None for an update.
        outcome: The latest answer to its update.
        pulled: The number of the round whose version answered it.
        epoch: The number of crashes before the latest answer.
        is_applied: Whether its change was seen.
        was_lost: Whether the client has said that its update was accepted and lost.
        is_given_up: Whether the client has forgotten it; copies of it may still be on their way.
    """

    kind: str
    client: str
    sequence: int
    life: "Life"
    number: int | None
    contribution: Contribution
    changes: Changes | None = None
    outcome: Pushed | None = None
    pulled: int | None = None
    epoch: int = -1
    is_applied: bool = False
    was_lost: bool = False
    is_given_up: bool = False
    later: set[int] = field(default_factory=set)
    """The calls that the server may remember in its place."""

    @property
    def is_answered(self) -> bool:
        return self.epoch >= 0

    @property
    def loaded(self) -> Loaded | None:
        """The values that it loads, if it does."""
        return None if self.changes is None else self.changes.loaded

    def __str__(self) -> str:
        what = "" if self.number is None else f" of u{self.number}"
        return f"{self.kind} {self.client}:{self.sequence}{what}"


class Calls:
    """The calls on parameters.

    Attributes:
        all: All of them.
        sent: Those that have sent updates, by update.
    """

    def __init__(self, life: "Life") -> None:
        self._life = life
        self.all: list[Call] = []
        self.sent: dict[int, Call] = {}

    def add(self, call: Call) -> None:
        """Adds a call that is about to be sent for the first time."""
        self.all.append(call)
        if call.number is not None:
            self.sent[call.number] = call

    @property
    def have_other_optimizers(self) -> bool:
        """True if somebody has asked for another optimizer, so that its state may have begun anew."""
        return any(each.changes is not None and each.changes.optimizer is not None for each in self.all)

    def note_sent(self, call: Call, epoch: int) -> None:
        """Notes that a call is sent: unless the server knows its answer, it may forget others for it.

        A call that was sent before, but may arrive later, counts as a later one, too.
        """
        for each in self.all:
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
        if call.epoch == epoch or call.changes is not None:
            return True
        assert call.outcome is not None
        if call.outcome.outcome is not Outcome.ACCEPTED:
            return False
        if self._life.durability is Durability.GRADIENT:
            return True
        ended = self._life.where.get(call.number) if call.number is not None else None
        return ended is not None and self._life.seen[ended].epoch == call.epoch

    def is_lost(self, call: Call, epoch: int) -> bool:
        """Returns True if a crash has taken an update that was accepted, as its sender sees it."""
        was_accepted = call.outcome is not None and call.outcome.outcome is Outcome.ACCEPTED
        return was_accepted and call.epoch != epoch and call.number not in self._life.where and call.changes is None

    def answered(self, call: Call, outcome: Pushed, version: Version | None, epoch: int) -> None:
        """Notes the answer to an update."""
        if version is not None:
            self._life.see(version)
        if call.is_answered and self.is_kept(call, epoch):
            check(
                _told(outcome) == _told(call.outcome), f"{call}: expected {_told(call.outcome)}, got {_told(outcome)}"
            )
            if version is not None and call.pulled is not None and outcome.round is not None:
                got, expected = version.round_number, call.pulled
                check(got == expected, f"{call}: expected the version of round {expected} again, got {got}")
        call.outcome, call.epoch = outcome, epoch
        call.pulled = None if version is None else version.round_number
        if outcome.round is not None and version is not None:
            joined, got = outcome.round.number, version.round_number
            check(got == joined, f"{call}: is in round {joined}, got the version of round {got}")
        if outcome.outcome is Outcome.ACCEPTED:
            self.check_weight(call, outcome.weight, outcome.staleness)
            newer = outcome.global_step - call.contribution.local_step
            check(outcome.staleness == newer, f"{call}: it is {newer} old, not {outcome.staleness}")
        elif outcome.outcome is Outcome.STALE:
            stale = outcome.staleness > self._life.spec.staleness.max
            check(stale and not outcome.weight, f"{call}: stale, but {outcome.staleness} old, weight {outcome.weight}")
        else:
            check(self._life.spec.one_per_worker or call.kind == "push_pull", f"{call}: all updates of a worker count")
        self.check_member(call)

    def check_member(self, call: Call) -> None:
        """Checks that an update that was said to count does, if its round has ended."""
        outcome = call.outcome
        if outcome is None or call.number is None:
            return
        if outcome.round is None or outcome.outcome is not Outcome.ACCEPTED:
            if call.number in self._life.where:
                ended = self._life.where[call.number]
                check(self._life.seen[ended].epoch != call.epoch, f"{call}: did not count, but is in round {ended}")
            return
        number = outcome.round.number
        is_promised = self._life.durability is Durability.GRADIENT or (
            number in self._life.seen and self._life.seen[number].epoch == call.epoch
        )
        if number in self._life.members and is_promised:
            is_there = call.number in self._life.members[number]
            check(is_there, f"{call}: was accepted, but is not in the version of round {number}")

    def check_counted(self, call: Call) -> None:
        """Checks, when all rounds have ended, that an update that was accepted is in a version, or was dropped."""
        outcome = call.outcome
        if (
            outcome is None
            or outcome.outcome is not Outcome.ACCEPTED
            or self._life.durability is not Durability.GRADIENT
        ):
            return
        assert outcome.round is not None
        is_there = call.number in self._life.where or outcome.round.number in self._life.dropped
        check(is_there, f"{call}: was accepted, and is in no version")

    def check_too_late(self, call: Call) -> None:
        """Checks, when a call has waited for too long, that its round had not ended before."""
        ended = None if call.number is None else self._life.where.get(call.number)
        if call.kind == "push_pull" and ended is not None:
            check(self._life.seen[ended].at >= now(), f"{call}: it waited on when round {ended} had ended")

    def check_weight(self, call: Call, weight: float, staleness: int) -> None:
        assert call.number is not None
        is_in_time = staleness <= self._life.spec.staleness.max or call.was_lost
        check(is_in_time, f"{call}: it counts, but is {staleness} versions old")
        expected = weight_of(call.number) * self._factor(staleness)
        check(math.isclose(weight, expected), f"{call}: it counts {weight}, not {expected}")

    def _factor(self, staleness: int) -> float:
        discount = self._life.spec.staleness.discount
        staleness = min(staleness, self._life.spec.staleness.max)
        if isinstance(discount, ConstantDiscount):
            return 1.0
        return 0.5**staleness if isinstance(discount, ExponentialDiscount) else 1 / (1 + staleness)


def now() -> float:
    """Returns the time by the clock of the world."""
    return asyncio.get_running_loop().time()


def _told(outcome: Pushed | None) -> tuple[Any, ...] | None:
    if outcome is None:
        return None
    joined = None if outcome.round is None else outcome.round.number
    counted = outcome.global_step, outcome.num_accumulated, outcome.staleness, outcome.weight
    return outcome.outcome.name, joined, *counted
