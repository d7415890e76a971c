"""How long calls may take."""

from dataclasses import dataclass

DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class TimeLimits:
    """How long the calls of a client may take, in seconds.

    Attributes:
        call: The client's timeout, math.inf for none: of a call, and of a wait that has no timeout of its own.
        reply: How long an answer that the server gives when a wait ends, its time up, may take to arrive.
        closing: How long a client that is closed waits for a server that is silent: what is private ends without it,
            somewhat later.
        slowest_bytes_per_second: Streams may take the time of a call, and that of a network that is as slow as this.
    """

    call: float = DEFAULT_TIMEOUT_SECONDS
    reply: float = 5.0
    closing: float = 10.0
    slowest_bytes_per_second: float = 1e6

    def wait(self, seconds: float) -> float:
        """Returns the limit of a call for which the server may wait on purpose; 0 s: it does not."""
        return seconds + self.reply if seconds else self.call

    def stream(self, num_bytes: int) -> float:
        """Returns the limit of a stream with a payload of this size."""
        return self.call + num_bytes / self.slowest_bytes_per_second
