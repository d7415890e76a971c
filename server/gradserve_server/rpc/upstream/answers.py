"""What a server upstream answers to gradients."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2
from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.rounds import Outcome

OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}


@dataclass(frozen=True)
class Pulled:
    """The answer to a push_pull.

    Attributes:
        outcome: What became of the gradient.
        average: The average; None if there is none.
        duplicate: Whether it is the answer to an earlier call.
        global_step: The step.
    """

    outcome: Outcome
    average: Average | None
    duplicate: bool
    global_step: int


Answer: TypeAlias = messages_pb2.ApplyGradientResponse | Pulled


def answer_of(message: Any, average: Average | None) -> Answer:
    """Returns the answer in a response upstream, with its average."""
    if isinstance(message, messages_pb2.ApplyGradientResponse):
        return message
    return Pulled(OUTCOMES[message.outcome], average, message.duplicate, message.global_step)
