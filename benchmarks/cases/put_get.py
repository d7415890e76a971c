"""One array to the server and back, beside Arrow Flight."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.comparison import Comparison, Target
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import FLIGHT, MALLOC_TUNED, PROJECT

MB = 1_000_000
_ONE_BATCH = "Arrow Flight, one batch"
_JOINED = "Arrow Flight, 1 MB batches joined"
_NO_VARIABLES: Mapping[str, str] = {}
_STEPS = {1 * MB: 20, 10 * MB: 10, 100 * MB: 4}


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

    contestants = [
        Contestant(
            "gradserve",
            PROJECT,
            server="benchmarks.peers.gradserve.server",
            worker="benchmarks.peers.gradserve.put_get",
            options=options,
        ),
        flight(_ONE_BATCH, num_bytes),
    ]
    if num_bytes > MB:
        contestants += [
            flight(_JOINED, MB, join=True),
            flight("Arrow Flight, joined, malloc tuned", MB, join=True, variables=MALLOC_TUNED),
            flight("Arrow Flight, left in 1 MB pieces", MB),
        ]
    contestants.append(
        Contestant(
            "bare grpcio stream, malloc tuned",
            PROJECT,
            server="benchmarks.peers.ceiling.server",
            worker="benchmarks.peers.ceiling.streams",
            options=options,
            variables=MALLOC_TUNED,
        )
    )
    return Comparison(
        title=f"{operation} {num_bytes // MB} MB",
        contestants=tuple(contestants),
        num_bytes=num_bytes,
        steps=steps,
        targets=(Target("Arrow Flight", (_ONE_BATCH, _JOINED), 0.8),) if num_bytes == 100 * MB else (),
    )
