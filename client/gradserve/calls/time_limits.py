"""Time limits of calls."""

from dataclasses import dataclass

DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class TimeLimits:
    """The time limits of a client's calls, in seconds.

    Attributes:
        call: The client's timeout, math.inf for none: of a call, and of a wait without a timeout of its own.
        reply: The time for an answer to arrive after the server has ended a wait whose time is up.
        closing: The time that a client on closing waits for a silent server. Its private resources end without it,
            somewhat later.
        slowest_bytes_per_second: A network speed. Streams may take as long as a call, and the time that a network of
            this speed needs for the payload.
    """

    call: float = DEFAULT_TIMEOUT_SECONDS
    reply: float = 5.0
    closing: float = 10.0
    slowest_bytes_per_second: float = 1e6

    def wait(self, seconds: float) -> float:
        """Returns the limit of a call in which the server may wait on purpose; 0 s: it does not wait."""
        return seconds + self.reply if seconds else self.call

    def stream(self, num_bytes: int) -> float:
        """Returns the limit of a stream with a payload of this size."""
        return self.call + self.transfer(num_bytes)

    def transfer(self, num_bytes: int) -> float:
        """Returns the time that a payload of this size takes on a slow network."""
        return num_bytes / self.slowest_bytes_per_second
