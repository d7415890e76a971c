"""The ways between gradserve's client and server, each by its name: cases never leave the choice to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT


@dataclass(frozen=True)
class Way:
    """One way to reach the server.

    Attributes:
        label: Its name in reports.
        transport: The argument of `gradserve.connect`.
        in_place: Gradients are arrays of `client.empty`, and averages are read where the server wrote them.
    """

    label: str
    transport: str
    in_place: bool = False

    def contestant(self, worker: str, num_workers: int, **options: Any) -> Contestant:
        """Returns gradserve going this way; `worker` is a module of `benchmarks.peers.gradserve`."""
        return Contestant(
            self.label,
            PROJECT,
            server="benchmarks.peers.gradserve.server",
            worker=f"benchmarks.peers.gradserve.{worker}",
            num_workers=num_workers,
            options={**options, "transport": self.transport, "in_place": self.in_place},
        )


IN_PLACE = Way("gradserve, shared memory, client.empty", "shared_memory", in_place=True)
SHARED_MEMORY = Way("gradserve, shared memory, ordinary arrays", "shared_memory")
BULK = Way("gradserve, bulk socket", "bulk")
GRPC = Way("gradserve, gRPC streams", "grpc")

WAYS = (IN_PLACE, SHARED_MEMORY, BULK, GRPC)
