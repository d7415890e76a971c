"""Messages between gRPC and the chain around calls, in both directions, within limits."""

from dataclasses import dataclass, field
from typing import Self

from gradserve_server.config import LimitsConfig
from gradserve_server.observe.traffic import Way
from gradserve_server.rpc.boundary.arriving import ArrivingRequests
from gradserve_server.rpc.boundary.connections import Connections
from gradserve_server.rpc.boundary.open_calls import OpenCalls
from gradserve_server.rpc.boundary.unread import UnreadReplies


@dataclass(frozen=True)
class Traffic:
    """The messages that gRPC has, of all calls of a listener.

    Attributes:
        calls: The calls.
        requests: Those that arrive.
        replies: Those that leave.
        way: Counts their bytes.
    """

    calls: OpenCalls
    requests: ArrivingRequests
    replies: UnreadReplies
    way: Way = field(default_factory=Way)

    @classmethod
    def within(cls, limits: LimitsConfig, way: Way | None = None) -> Self:
        """Returns the traffic of a server with these limits, which counts its bytes."""
        connections = Connections()
        room, seconds = limits.max_queued_bytes, limits.message_idle_seconds
        return cls(
            OpenCalls(limits.max_calls, limits.max_connections, limits.max_connection_calls, connections.end),
            ArrivingRequests(room, limits.max_message_bytes, seconds, connections),
            UnreadReplies(room, seconds, connections),
            way or Way(),
        )
