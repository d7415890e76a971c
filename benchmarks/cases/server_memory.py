"""The server's peak memory with up to 8 workers of 100 MB gradients."""

from __future__ import annotations

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.memory import MemoryMeasurement

_NUM_BYTES = 100_000_000
_NUM_WORKERS = (1, 2, 4, 8)
_STEPS = 3


def measurements() -> list[MemoryMeasurement]:
    """Rounds in which one worker takes, and rounds in which everybody reads."""
    return [
        _measure("server memory, all apply, one takes", "rounds"),
        _measure("server memory, push_pull, all read", "push_pull"),
    ]


def _measure(title: str, worker: str) -> MemoryMeasurement:
    return MemoryMeasurement(
        title=title,
        num_bytes=_NUM_BYTES,
        contestants=tuple(
            Contestant(
                "gradserve",
                PROJECT,
                server="benchmarks.peers.gradserve.server",
                worker=f"benchmarks.peers.gradserve.{worker}",
                num_workers=num_workers,
                options={"num_bytes": _NUM_BYTES},
            )
            for num_workers in _NUM_WORKERS
        ),
        steps=_STEPS,
    )
