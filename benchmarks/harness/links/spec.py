"""A link as a case describes it, and the two ends of one that is up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.links.network import capped_link
from benchmarks.harness.links.relay import DelayingRelay

GRPC_PORT, BULK_PORT = 50051, 50052
"""The ports of servers in namespaces, in which all ports are free."""
_RELAY_QUEUE_SECONDS = 0.02


@dataclass(frozen=True)
class Ends:
    """The two ends of a link, for a server and its clients.

    Attributes:
        enter: A command that becomes the command that follows it, where the server is to run.
        listen: The server's address for gRPC, and for whatever has one port.
        bulk_listen: The server's address for bulk sockets, on all of its hosts, so that clients choose the host.
        address: The address to which clients connect instead of `listen`.
        device: The name of the clients' device; what it sends goes to the server.
    """

    enter: tuple[str, ...]
    listen: str
    bulk_listen: str
    address: str
    device: str


@dataclass(frozen=True)
class LinkSpec:
    """A link between a server and all of its clients.

    Attributes:
        megabits: The bandwidth of each direction, in Mbit/s.
        round_trip: The delay of both directions together, in seconds.
        by_packet: Whether packets are delayed, so that TCP waits for its acknowledgements as on a long link. Otherwise
            the bytes of connections are, in a relay that answers at once.
    """

    megabits: float
    round_trip: float = 0.0
    by_packet: bool = False

    @property
    def name(self) -> str:
        """The link in a title, such as "200 Mbit/s, 20 ms"."""
        delay = f", {self.round_trip * 1e3:g} ms" if self.round_trip else ""
        delay += " by packet" if self.by_packet else ""
        rate = f"{self.megabits / 1e3:g} Gbit/s" if self.megabits >= 1e3 else f"{self.megabits:g} Mbit/s"
        return f"{rate}{delay}"

    @contextlib.contextmanager
    def up(self) -> Iterator[Ends]:
        """Makes the link, until the end of the block.

        Raises:
            LinkNotAvailableError: The machine has no such links, or this process is not allowed to make them.
        """
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(capped_link(self.megabits, self.round_trip if self.by_packet else 0.0))
            host = link.there
            if self.round_trip and not self.by_packet:
                host = link.here
                capacity = int(self.megabits * 1e6 / 8 * (self.round_trip + _RELAY_QUEUE_SECONDS))
                ports = (GRPC_PORT, BULK_PORT)
                stack.enter_context(DelayingRelay(host, link.there, ports, self.round_trip / 2, capacity))
            ports_there = f"{link.there}:{GRPC_PORT}", f"0.0.0.0:{BULK_PORT}"
            yield Ends(link.enter, *ports_there, f"{host}:{GRPC_PORT}", link.device)
