"""The events that change an accumulator's rounds and its memory of calls; nothing else changes them."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from gradserve_server.accumulators.gradient import Contribution, Summand
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


Event: TypeAlias = GradientAnswered | RoundEnded | StepSet | AnswersReceived | ClientsForgotten

Record: TypeAlias = dict[str, Any]
"""An event in types that every serialization format supports."""


def to_record(event: Event) -> Record:
    """Converts an event to a record; the reverse of `from_record`."""
    match event:
        case GradientAnswered():
            return {
                "event": "gradient_answered",
                "call": _call_record(event.call),
                "contribution": contribution_record(event.contribution),
                "outcome": event.outcome.value,
                "awaits_average": event.awaits_average,
            }
        case RoundEnded():
            return {"event": "round_ended", "taken_by": _call_record(event.taken_by)}
        case StepSet():
            return {"event": "step_set", "global_step": event.global_step, "abandoned": list(event.abandoned)}
        case AnswersReceived():
            return {
                "event": "answers_received",
                "client_id": event.client_id,
                "sequences": list(event.sequences),
            }
        case ClientsForgotten():
            return {"event": "clients_forgotten", "client_ids": list(event.client_ids)}


def from_record(record: Record) -> Event:
    """Converts a record to an event.

    Raises:
        ValueError: The record is not of a known event.
    """
    match record["event"]:
        case "gradient_answered":
            return GradientAnswered(
                _call_of(record["call"]),
                contribution_of(record["contribution"]),
                Outcome(record["outcome"]),
                record["awaits_average"],
            )
        case "round_ended":
            return RoundEnded(_call_of(record["taken_by"]))
        case "step_set":
            return StepSet(record["global_step"], tuple(record.get("abandoned", ())))
        case "answers_received":
            return AnswersReceived(record["client_id"], tuple(record["sequences"]))
        case "clients_forgotten":
            return ClientsForgotten(tuple(record["client_ids"]))
        case other:
            raise ValueError(f"expected a known event, got {other!r}")


def contribution_record(contribution: Contribution) -> Record:
    """Converts a contribution to a record; the reverse of `contribution_of`."""
    record: Record = {name: getattr(contribution, name) for name in ("local_step", "weight", "worker_id", "sequence")}
    if contribution.part:
        record["part"] = contribution.part
    if contribution.sum_of:
        record["sum_of"] = [[each.weight, each.worker_id, _call_record(each.call)] for each in contribution.sum_of]
    return record


def contribution_of(record: Record) -> Contribution:
    """Converts a record to a contribution.

    Raises:
        TypeError, ValueError, KeyError: It is no such record.
    """
    rest = dict(record)
    sum_of = [Summand(weight, worker_id, _call_of(call)) for weight, worker_id, call in rest.pop("sum_of", ())]
    return Contribution(**rest, sum_of=tuple(sum_of))


def _call_record(call: RequestId | None) -> Record | None:
    if call is None:
        return None
    return {"client_id": call.client_id, "sequence": call.sequence, "fingerprint": call.fingerprint.hex()}


def _call_of(record: Record | None) -> RequestId | None:
    if record is None:
        return None
    return RequestId(record["client_id"], record["sequence"], bytes.fromhex(record["fingerprint"]))
