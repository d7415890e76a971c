"""One array to the server and back, beside Arrow Flight and a raw socket."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK, GRPC, SHARED_MEMORY
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import FLIGHT, MALLOC_TUNED, PROJECT
from benchmarks.harness.verdicts import Target

_ONE_BATCH = "Arrow Flight, one batch"
_JOINED = "Arrow Flight, 1 MB batches joined"
_RAW_SOCKET = "raw loopback socket"
_NO_VARIABLES: Mapping[str, str] = {}
_STEPS = {10 * MB: 10, 100 * MB: 4}
_TARGETS = (
    Target("Arrow Flight", (_ONE_BATCH, _JOINED), 1.5, BULK.label),
    Target(_RAW_SOCKET, (_RAW_SOCKET,), 0.6, BULK.label),
)


def comparisons() -> list[Comparison]:
    """Returns both operations in all sizes."""
    return [
        _compare(operation, num_bytes, steps) for operation in ("put", "get") for num_bytes, steps in _STEPS.items()
    ]


def _compare(operation: str, num_bytes: int, steps: int) -> Comparison:
    options = {"operation": operation, "num_bytes": num_bytes}

    def flight(
        label: str, batch_bytes: int, *, join: bool = False, variables: Mapping[str, str] = _NO_VARIABLES
    ) -> Contestant:
        return Contestant(
            label,
            FLIGHT,
            server="benchmarks.peers.flight.server",
            worker="benchmarks.peers.flight.put_get",
            options={**options, "batch_bytes": batch_bytes, "join": join},
            variables=variables,
        )

    def without_store(label: str, peer: str, worker: str, variables: Mapping[str, str] = _NO_VARIABLES) -> Contestant:
        return Contestant(
            label,
            PROJECT,
            server=f"benchmarks.peers.{peer}.server",
            worker=f"benchmarks.peers.{peer}.{worker}",
            options=options,
            variables=variables,
        )

    ways = (BULK, SHARED_MEMORY, GRPC)
    contestants = (
        *(way.contestant("put_get", 1, **options) for way in ways),
        flight(_ONE_BATCH, num_bytes),
        flight(_JOINED, MB, join=True),
        flight("Arrow Flight, joined, malloc tuned", MB, join=True, variables=MALLOC_TUNED),
        flight("Arrow Flight, left in 1 MB pieces", MB),
        without_store(_RAW_SOCKET, "raw_socket", "transfers"),
        without_store("bare grpcio stream, malloc tuned", "ceiling", "streams", MALLOC_TUNED),
    )
    return Comparison(
        title=f"{operation} {size_name(num_bytes)}",
        contestants=contestants,
        num_bytes=num_bytes,
        steps=steps,
        targets=_TARGETS if num_bytes == 100 * MB else (),
        num_own=len(ways),
    )
