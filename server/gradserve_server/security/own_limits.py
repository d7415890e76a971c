"""The limits of one identity, and of one container."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnLimits:
    """The limits of one identity, besides those that all share; None for none of its own.

    Attributes:
        max_bytes: The bytes of its stored tensors, accumulators, layers and forwards.
        max_handles: Its stored tensors and forwards.
        max_calls: Its calls under way, those that wait included.
        max_waiters: Its calls that wait for averages.
        calls_per_second: How many calls it may begin in a second, and at once after a pause.
        max_connections: Its connections to sockets.
        max_region_bytes: The memory that its clients share with the server.
        max_device_bytes: The bytes that it takes of the device's memory.
    """

    max_bytes: int | None = None
    max_handles: int | None = None
    max_calls: int | None = None
    max_waiters: int | None = None
    calls_per_second: float | None = None
    max_connections: int | None = None
    max_region_bytes: int | None = None
    max_device_bytes: int | None = None


NO_LIMITS = OwnLimits()


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of one container; None for none of its own.

    Attributes:
        max_bytes: The bytes of its accumulators, layers and forwards.
        max_accumulators: Its accumulators.
        max_layers: Its layers.
        max_waiters: The calls that wait for averages of its accumulators.
    """

    max_bytes: int | None = None
    max_accumulators: int | None = None
    max_layers: int | None = None
    max_waiters: int | None = None


NO_CONTAINER_LIMITS = ContainerLimits()
