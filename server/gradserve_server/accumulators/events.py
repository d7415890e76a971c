"""The events that change the rounds of an accumulator and what it remembers of calls; nothing else does."""

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.results import Outcome


@dataclass(frozen=True, slots=True)
class GradientAnswered:
    """It was decided what becomes of a gradient.

    Attributes:
        call: The id of the call that brought it, if it has one.
        contribution: Who sent it, and what it counts.
        outcome: Whether it counts.
        awaits_average: The call is a push_pull: the end of the round answers it.
    """

    call: RequestId | None
    contribution: Contribution
    outcome: Outcome
    awaits_average: bool = False


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The current round has ended.

    Attributes:
        taken_by: The id of the take that ended it; None for one without an id, or if a push_pull did.
    """

    taken_by: RequestId | None = None


@dataclass(frozen=True, slots=True)
class StepSet:
    """The step was set; what is in the round stays."""

    global_step: int


@dataclass(frozen=True, slots=True)
class AnswersReceived:
    """Calls of a client await the average of the current round no more, as a later call of it told.

    Attributes:
        client_id: The client.
        sequences: The numbers of the calls.
    """

    client_id: str
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientsForgotten:
    """Clients were silent for so long that nothing is remembered of their calls any more."""

    client_ids: tuple[str, ...]


Event: TypeAlias = GradientAnswered | RoundEnded | StepSet | AnswersReceived | ClientsForgotten

Record: TypeAlias = dict[str, Any]
"""An event in types that every serialization format has."""


def to_record(event: Event) -> Record:
    """Returns an event as a record; `from_record` is the reverse."""
    match event:
        case GradientAnswered():
            return {
                "event": "gradient_answered",
                "call": _call_record(event.call),
                "contribution": asdict(event.contribution),
                "outcome": event.outcome.value,
                "awaits_average": event.awaits_average,
            }
        case RoundEnded():
            return {"event": "round_ended", "taken_by": _call_record(event.taken_by)}
        case StepSet():
            return {"event": "step_set", "global_step": event.global_step}
        case AnswersReceived():
            return {
                "event": "answers_received",
                "client_id": event.client_id,
                "sequences": list(event.sequences),
            }
        case ClientsForgotten():
            return {"event": "clients_forgotten", "client_ids": list(event.client_ids)}


def from_record(record: Record) -> Event:
    """Returns the event of a record.

    Raises:
        ValueError: There is no such event.
    """
    match record["event"]:
        case "gradient_answered":
            return GradientAnswered(
                _call_of(record["call"]),
                Contribution(**record["contribution"]),
                Outcome(record["outcome"]),
                record["awaits_average"],
            )
        case "round_ended":
            return RoundEnded(_call_of(record["taken_by"]))
        case "step_set":
            return StepSet(record["global_step"])
        case "answers_received":
            return AnswersReceived(record["client_id"], tuple(record["sequences"]))
        case "clients_forgotten":
            return ClientsForgotten(tuple(record["client_ids"]))
        case other:
            raise ValueError(f"expected a known event, got {other!r}")


def _call_record(call: RequestId | None) -> Record | None:
    if call is None:
        return None
    return {"client_id": call.client_id, "sequence": call.sequence, "fingerprint": call.fingerprint.hex()}


def _call_of(record: Record | None) -> RequestId | None:
    if record is None:
        return None
    return RequestId(record["client_id"], record["sequence"], bytes.fromhex(record["fingerprint"]))
