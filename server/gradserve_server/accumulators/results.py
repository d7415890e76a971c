"""What an accumulator answers."""

from dataclasses import dataclass
from enum import Enum

from gradserve_server.accumulators.rounds import Round


class Outcome(Enum):
    """What became of a gradient."""

    ACCEPTED = "ACCEPTED"
    """It is in the round."""
    STALE = "STALE"
    """It was computed at a step before the current one, and dropped."""
    ALREADY_COUNTED = "ALREADY_COUNTED"
    """A gradient of the same worker is in the round already; this one was dropped."""


@dataclass(frozen=True)
class Applied:
    """What became of a gradient.

    Attributes:
        outcome: Whether it counts.
        round: The round its worker is in; None when it was stale.
        global_step: The step right after.
        num_accumulated: Gradients in the round right after.
    """

    outcome: Outcome
    round: Round | None
    global_step: int
    num_accumulated: int


@dataclass(frozen=True)
class AccumulatorState:
    """An accumulator at one moment; see AccumulatorInfo in the protos."""

    global_step: int
    num_accumulated: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
