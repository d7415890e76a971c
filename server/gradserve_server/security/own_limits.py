"""The limits of one identity, and of one container."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnLimits:
    """The limits of one identity, besides those that all share; None for none of its own.

    Attributes:
        max_bytes: The bytes of its stored tensors.
        max_handles: Its stored tensors.
        max_calls: Its calls under way, those that wait included.
        calls_per_second: How many calls it may begin in a second, and at once after a pause.
        max_connections: Its connections to sockets.
        max_region_bytes: The memory that its clients share with the server.
    """

    max_bytes: int | None = None
    max_handles: int | None = None
    max_calls: int | None = None
    calls_per_second: float | None = None
    max_connections: int | None = None
    max_region_bytes: int | None = None


NO_LIMITS = OwnLimits()


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of one container; None for none of its own."""

    max_accumulators: int | None = None
    max_layers: int | None = None
