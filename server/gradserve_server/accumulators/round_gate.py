"""Lets rounds of accumulators begin, or holds them."""

from gradserve_server.errors import ResourceExhaustedError

_RETRY_SECONDS = 0.5


class RoundGate:
    """The gate of all accumulators of a server: while it is shut, rounds end, and none begins.

    Attributes:
        is_shut: Whether rounds are held.
    """

    def __init__(self) -> None:
        """Begins open."""
        self.is_shut = False

    def check(self, num_accumulated: int) -> None:
        """Checks that a gradient may join a round.

        Args:
            num_accumulated: The gradients that the round has.

        Raises:
            ResourceExhaustedError: It would begin a round, which are held. The same call may be sent again.
        """
        if self.is_shut and not num_accumulated:
            raise ResourceExhaustedError(
                "this server holds new rounds, as its cluster is about to change its size: send the gradient again",
                retry_after=_RETRY_SECONDS,
            )
