"""The ledger of an accumulator: its rounds, and the outcomes of the calls that changed them.

It changes only by events, and the same events give the same ledger.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.rounds import Applied, Outcome, Round, Rounds


@dataclass(frozen=True, slots=True)
class GradientAnswered:
    """The decision on a gradient.

    Attributes:
        call: The id of the call that brought it, if it has one.
        contribution: The sender, step and weight of the gradient.
        outcome: Whether it counts.
        awaits_average: Whether the call is a push_pull, which is answered at the end of the round.
    """

    call: RequestId | None
    contribution: Contribution
    outcome: Outcome
    awaits_average: bool = False


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The end of the current round.

    Attributes:
        taken_by: The id of the take that ended it; None for a take without an id, and for a push_pull.
    """

    taken_by: RequestId | None = None


@dataclass(frozen=True, slots=True)
class StepSet:
    """A change of the step.

    Attributes:
        global_step: The new step.
        abandoned: The rounds whose averages are dropped, as they led beyond that step.
        drops_round: Whether the gradients of the round do not count; otherwise they stay in it.
    """

    global_step: int
    abandoned: tuple[int, ...] = ()
    drops_round: bool = False


@dataclass(frozen=True, slots=True)
class AnswersReceived:
    """Calls of a client no longer await the average of the current round, as its later call shows.

    Attributes:
        client_id: The id of the client.
        sequences: The numbers of the calls.
    """

    client_id: str
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientsForgotten:
    """Clients were silent for so long that their calls are forgotten."""

    client_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OtherChange:
    """The base of events that only some resources have. They do not change rounds."""


Event: TypeAlias = GradientAnswered | RoundEnded | StepSet | AnswersReceived | ClientsForgotten | OtherChange


@dataclass(frozen=True)
class Taken:
    """The outcome of a take.

    Attributes:
        round: The round that it ended.
    """

    round: Round


Answer = Applied | Taken


class Ledger:
    """Decides which gradients count, and remembers the decisions.

    Its state depends on the events alone: the same events in the same order, applied to another ledger, give the same
    state. It neither computes averages nor waits.
    """

    def __init__(self, calls: CallMemory[Answer]) -> None:
        self.rounds = Rounds()
        self.calls = calls
        """The remembered outcomes of calls."""
        self._awaiting: dict[str, set[RequestId]] = {}

    @property
    def awaiting(self) -> frozenset[RequestId]:
        """The calls that the average of the current round answers."""
        return frozenset(call for calls in self._awaiting.values() for call in calls)

    def outcome_of(self, call: RequestId) -> tuple[str, int]:
        """Returns what is known of a call, as `RequestStatus` says: the outcome, "" if nothing is, and the step."""
        answer, is_forgotten = self.calls.knows(call)
        if answer is None:
            return "forgotten" if is_forgotten else "", 0
        step = 0 if answer.round is None else answer.round.step or 0
        if isinstance(answer, Taken):
            return "done", step
        if answer.outcome is Outcome.ACCEPTED and not answer.still_counts():
            return "dropped", 0
        return answer.outcome.name.lower(), step

    def overdue(self, call: RequestId | None) -> list[Event]:
        """Returns the events by which the arrival of a call shows that others can be forgotten; usually none.

        The call may acknowledge earlier ones of its client, which then no longer await an average. If the client is
        new, silent clients are forgotten.
        """
        if call is None:
            return []
        events: list[Event] = []
        awaiting = self._awaiting.get(call.client_id)
        if awaiting:
            received = sorted(each.sequence for each in awaiting if call.acknowledges(each.sequence))
            if received:
                events.append(AnswersReceived(call.client_id, tuple(received)))
        silent = self.calls.silent(call)
        if silent:
            events.append(ClientsForgotten(silent))
        return events

    def judge(
        self,
        call: RequestId | None,
        contribution: Contribution,
        gradient: Gradient,
        *,
        one_per_worker: bool,
        awaits_average: bool,
    ) -> GradientAnswered:
        """Returns the decision on a gradient, as of now.

        Args:
            call: The id of the call that brings it, if it has one.
            contribution: The sender, step and weight of the gradient.
            gradient: Its values, for those that keep records of their size.
            one_per_worker: Whether only the first gradient of each worker counts.
            awaits_average: Whether the call is a push_pull.
        """
        outcome = Outcome.ACCEPTED
        if self.rounds.is_stale(contribution):
            outcome = Outcome.STALE
        elif one_per_worker and not self._has_new_workers(contribution):
            outcome = Outcome.ALREADY_COUNTED
        return GradientAnswered(call, contribution, outcome, awaits_average)

    def ending(self, call: RequestId | None) -> RoundEnded:
        """Returns the decision to end the round, as of now.

        Args:
            call: The id of the take for which it ends; None if it has none, or for a push_pull.
        """
        return RoundEnded(call)

    def _has_new_workers(self, contribution: Contribution) -> bool:
        """Returns True if no worker with an id is already in the round or twice in a sum."""
        present = self.rounds.members.workers
        if not contribution.sum_of:
            return contribution.worker_id not in present
        named = [each for each in contribution.workers if each]
        return len(set(named)) == len(named) and present.keys().isdisjoint(named)

    def answer(self, event: GradientAnswered) -> Applied:
        """Applies the decision on a gradient; returns the answer to its call."""
        joined = None if event.outcome is Outcome.STALE else self.rounds.current
        if event.outcome is Outcome.ACCEPTED:
            joined = self.rounds.admit(event.contribution)
        applied = self._applied(event, joined)
        for call, answer in self._answers(event, applied):
            if joined is not None and event.awaits_average:
                self._await(call)
            self.calls.remember(call, answer)
        return applied

    def _answers(self, event: GradientAnswered, applied: Applied) -> Iterable[tuple[RequestId | None, Applied]]:
        """Returns the calls that an event answers, with their answers."""
        return [(call, applied) for call in (event.call, *event.contribution.calls)]

    def _applied(self, event: GradientAnswered, joined: Round | None) -> Applied:
        return Applied(event.outcome, joined, self.rounds.global_step, self.rounds.members.count)

    def answered_by(self, event: RoundEnded) -> list[RequestId]:
        """Returns the calls that the average of the current round will answer."""
        calls = {call: None for calls in self._awaiting.values() for call in calls}
        if event.taken_by is not None:
            calls[event.taken_by] = None
        return list(calls)

    def end_round(self, event: RoundEnded) -> Round:
        """Ends the round; returns it."""
        ended = self.rounds.close()
        self.calls.remember(event.taken_by, Taken(ended))
        self._awaiting.clear()
        return ended

    def set_step(self, event: StepSet) -> None:
        """Sets the step, and drops the round if the event says so."""
        if event.drops_round:
            self.rounds.drop()
            self._awaiting.clear()
        self.rounds.set_global_step(event.global_step)

    @property
    def num_named(self) -> int:
        """The number of workers whose ids are kept."""
        return len(self.rounds.members.workers) + len(self.rounds.missing_workers)

    @property
    def other_bytes(self) -> int:
        """The memory of what else is kept, of members and beside them."""
        return 0

    def other_bytes_of(self, contribution: Contribution) -> int:
        """Returns by how much `other_bytes` grows if a gradient is accepted."""
        return 0

    def num_new(self, contribution: Contribution) -> int:
        """Returns the number of workers whose ids would have to be kept in addition if a gradient is accepted."""
        present, missing = self.rounds.members.workers, self.rounds.missing_workers
        num_new = 0
        for worker_id in contribution.workers:
            if worker_id and worker_id not in present and worker_id not in missing:
                num_new += 1
        return num_new

    def expect(self, call: RequestId) -> None:
        """Notes a call that the average of the current round will answer, as an earlier run of the server left it."""
        self._await(call)

    def replay(self, event: Event) -> None:
        """Applies an event, without an answer."""
        match event:
            case GradientAnswered():
                self.answer(event)
            case RoundEnded():
                self.end_round(event)
            case StepSet():
                self.set_step(event)
            case AnswersReceived():
                self._receive(event)
            case ClientsForgotten(client_ids):
                self.calls.forget(client_ids)

    def _receive(self, event: AnswersReceived) -> None:
        awaiting = self._awaiting.get(event.client_id, set())
        awaiting -= {call for call in awaiting if call.sequence in event.sequences}
        if not awaiting:
            self._awaiting.pop(event.client_id, None)

    def _await(self, call: RequestId | None) -> None:
        if call is not None:
            self._awaiting.setdefault(call.client_id, set()).add(call)
