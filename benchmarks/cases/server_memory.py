"""The server's peak memory with up to 8 workers of 100 MB gradients."""

from __future__ import annotations

from benchmarks.cases.sizes import MB
from benchmarks.cases.ways import BULK, GRPC, IN_PLACE, SHARED_MEMORY, WAYS, Way
from benchmarks.harness.memory import MemoryLimit, MemoryMeasurement

_NUM_BYTES = 100 * MB
_MOST_WORKERS = 8
_STEPS = 3
_LIMITS = {
    IN_PLACE: MemoryLimit(_MOST_WORKERS, 250 * MB),
    SHARED_MEMORY: MemoryLimit(_MOST_WORKERS, 250 * MB),
    BULK: MemoryLimit(_MOST_WORKERS, 600 * MB),
    GRPC: MemoryLimit(_MOST_WORKERS, 600 * MB),
}


def measurements() -> list[MemoryMeasurement]:
    """Rounds in which one worker takes, and rounds in which everybody reads, by every way."""
    return [
        *(_measure("all apply, one takes", "rounds", way, (2, _MOST_WORKERS)) for way in WAYS),
        *(_measure("push_pull, all read", "push_pull", way, (_MOST_WORKERS,)) for way in WAYS),
    ]


def _measure(title: str, worker: str, way: Way, nums_workers: tuple[int, ...]) -> MemoryMeasurement:
    return MemoryMeasurement(
        title=f"server memory, {title}",
        num_bytes=_NUM_BYTES,
        contestants=tuple(way.contestant(worker, num_workers, num_bytes=_NUM_BYTES) for num_workers in nums_workers),
        steps=_STEPS,
        limit=_LIMITS[way],
    )
