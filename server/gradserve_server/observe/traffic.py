"""Bytes between the server and its clients."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Way:
    """What came and went by one way.

    Attributes:
        received: Bytes of requests, messages and tensors alike.
        sent: Bytes of replies.
        calls: The number of calls.
    """

    received: int = 0
    sent: int = 0
    calls: int = 0


@dataclass(frozen=True)
class WireTraffic:
    """The ways on which calls come.

    Attributes:
        grpc: gRPC, over TCP or a Unix socket.
        bulk: Sockets over TCP.
        shared_memory: Unix sockets, with tensors in memory that client and server share.
    """

    grpc: Way = field(default_factory=Way)
    bulk: Way = field(default_factory=Way)
    shared_memory: Way = field(default_factory=Way)

    def by_name(self) -> dict[str, Way]:
        """Returns the ways by the names that clients know them by."""
        return {"grpc": self.grpc, "bulk": self.bulk, "shared_memory": self.shared_memory}
