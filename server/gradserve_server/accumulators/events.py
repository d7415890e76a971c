"""The events that change an accumulator's rounds and its memory of calls; nothing else changes them."""

from dataclasses import dataclass
from typing import TypeAlias

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome


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
    """A change of the step, which leaves the round as it is.

    Attributes:
        global_step: The new step.
        abandoned: The rounds whose averages are dropped, as they led beyond that step.
    """

    global_step: int
    abandoned: tuple[int, ...] = ()


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
