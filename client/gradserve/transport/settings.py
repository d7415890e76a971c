"""The settings of a connection."""

from dataclasses import dataclass, field

from gradserve.calls.retries import RetryPolicy
from gradserve.calls.time_limits import TimeLimits


@dataclass(frozen=True)
class Keepalive:
    """The detection of a lost server, by connections with waiting calls.

    Attributes:
        interval: Seconds without traffic before it asks for a sign of life. Servers allow 10 s and more.
        timeout: Seconds that it then waits for one.
    """

    interval: float = 30.0
    timeout: float = 15.0


@dataclass(frozen=True)
class Reconnecting:
    """The attempts to make a connection that failed or was lost.

    Attributes:
        first_pause: Seconds between the first two attempts; later pauses grow.
        longest_pause: The most seconds between attempts. gRPC's default is 2 minutes, in which a server that is back
            goes unnoticed.
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
        kept: The longest request that is sent again over another connection if the server has not seen it. Inline
            tensors are up to 3 MiB.
    """

    longest: int | None = None
    kept: int = 4 << 20


@dataclass(frozen=True)
class ConnectionSettings:
    """All settings of a client's connections, with defaults.

    Attributes:
        times: The time limits of calls.
        retries: The retries of calls while the server is unavailable.
        keepalive: The detection of dead connections.
        reconnecting: The attempts to connect again.
        sizes: The sizes of messages.
    """

    times: TimeLimits = field(default_factory=TimeLimits)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    keepalive: Keepalive = field(default_factory=Keepalive)
    reconnecting: Reconnecting = field(default_factory=Reconnecting)
    sizes: MessageSizes = field(default_factory=MessageSizes)
