"""What an aggregator counts."""

from dataclasses import dataclass


@dataclass
class Counts:
    """Numbers since the start of the server, for metrics.

    Attributes:
        gradients: The gradients that have come for accumulators upstream.
        sums: The sums of several that were passed on.
        alone: The gradients that were passed on alone.
        downloads: The averages that were read upstream for readers here.
        reads: The averages that readers here were given.
    """

    gradients: int = 0
    sums: int = 0
    alone: int = 0
    downloads: int = 0
    reads: int = 0
