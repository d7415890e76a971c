"""Health checks while four workers stream gradients."""

from __future__ import annotations

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import WAYS
from benchmarks.harness.latency import LatencyMeasurement

_NUM_BYTES = 100 * MB
_NUM_STREAMING = 4
_SECONDS = 5.0
_P99_LIMIT = 0.05


def measurements() -> list[LatencyMeasurement]:
    """Every way for the gradients; the health checks always use gRPC."""
    return [
        LatencyMeasurement(
            title=f"health check while {_NUM_STREAMING} workers stream {size_name(_NUM_BYTES)}",
            contestants=tuple(
                way.contestant("health", 1 + _NUM_STREAMING, num_bytes=_NUM_BYTES, seconds=_SECONDS) for way in WAYS
            ),
            p99_limit=_P99_LIMIT,
        )
    ]
