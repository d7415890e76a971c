"""When an aggregator passes gradients on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardingRule:
    """When gradients are passed on.

    Attributes:
        num_gradients: How many go together.
        grace: Seconds that the first of them waits for others at most.
    """

    num_gradients: int
    grace: float
