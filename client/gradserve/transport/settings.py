"""The settings of a connection."""

from dataclasses import dataclass, field

from gradserve.calls.retries import RetryPolicy
from gradserve.calls.time_limits import TimeLimits


@dataclass(frozen=True)
class Keepalive:
    """How a connection with calls that wait notices that the server is gone.

    Attributes:
        interval: Seconds without traffic after which it asks for a sign of life. Servers allow 10 s and more.
        timeout: Seconds for which it then waits for one.
    """

    interval: float = 30.0
    timeout: float = 15.0


@dataclass(frozen=True)
class Reconnecting:
    """How a connection that was lost, or never was, is made.

    Attributes:
        first_pause: Seconds between the first two attempts; the following pauses grow.
        longest_pause: Seconds that no pause exceeds. gRPC's own grow to 2 minutes, in which a server that is back is
            not noticed.
        attempt: Seconds that an attempt may take.
    """

    first_pause: float = 0.1
    longest_pause: float = 5.0
    attempt: float = 20.0


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of messages, in bytes.

    Attributes:
        longest: The longest message that is sent or received, None for any.
        kept: Requests that the server has not seen are sent over another connection if they are not longer than this.
            Inline tensors are up to 3 MiB.
    """

    longest: int | None = None
    kept: int = 4 << 20


@dataclass(frozen=True)
class ConnectionSettings:
    """All that can be set of the connections of a client, with what is usual.

    Attributes:
        times: How long calls may take.
        retries: How calls are tried again while the server is unavailable.
        keepalive: How a dead connection is noticed.
        reconnecting: How a connection is made again.
        sizes: Those of messages.
    """

    times: TimeLimits = field(default_factory=TimeLimits)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    keepalive: Keepalive = field(default_factory=Keepalive)
    reconnecting: Reconnecting = field(default_factory=Reconnecting)
    sizes: MessageSizes = field(default_factory=MessageSizes)
