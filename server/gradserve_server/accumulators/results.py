"""The answers of an accumulator."""

from dataclasses import dataclass
from enum import Enum

from gradserve_server.accumulators.rounds import Round


class Outcome(Enum):
    """The outcome of a gradient."""

    ACCEPTED = "ACCEPTED"
    """The gradient is in the round."""
    STALE = "STALE"
    """The gradient was computed at an earlier step than the current one, and dropped."""
    ALREADY_COUNTED = "ALREADY_COUNTED"
    """The round already has a gradient of the same worker; this one was dropped."""


@dataclass(frozen=True)
class Applied:
    """The outcome of a gradient, and the accumulator's state after it.

    Attributes:
        outcome: Whether it counts.
        round: The round that has a gradient of its worker; None if it was stale.
        global_step: The step after it.
        num_accumulated: The number of gradients in the round after it.
    """

    outcome: Outcome
    round: Round | None
    global_step: int
    num_accumulated: int


@dataclass(frozen=True)
class AccumulatorState:
    """The state of an accumulator at one moment; see AccumulatorInfo in the protos."""

    global_step: int
    epoch: int
    num_accumulated: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
