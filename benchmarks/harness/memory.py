"""The peak memory of gradserve's server for growing numbers of workers, and its parts.

When all W workers send at once, W gradients are received, each into a buffer of its own, because an incomplete gradient
must not touch the sum. The first complete one becomes the sum, which is divided in place to give the average, so
neither takes memory of its own. The average of the round before is kept for readers and retries. So W + 1 gradients are
accounted for; the rest are messages under way, in gRPC's buffers and in the heap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import NotAvailableError
from benchmarks.harness.processes import ProcessError

KEPT_AVERAGES = 1
"""The default of accumulators."""


@dataclass(frozen=True)
class MemoryUse:
    """The resident memory of one server, in bytes."""

    num_workers: int
    idle: int
    """The memory with all workers connected and the accumulator made, before the first gradient."""
    peak: int
    """The most memory in all rounds."""
    after: int
    """The memory after the last round, with nothing under way: the server keeps freed buffers for the next one."""


@dataclass(frozen=True)
class MemoryMeasurement:
    """The same rounds, with a fresh server for each number of workers."""

    title: str
    num_bytes: int
    """The payload of one gradient, which is the unit of the report."""
    contestants: tuple[Contestant, ...]
    """gradserve with each number of workers."""
    steps: int

    def run(self, repeats: int, progress: Callable[[str], None]) -> MemoryResult:
        """Measures each number of workers once; a high-water mark needs no repetitions."""
        uses = []
        failure = None
        for contestant in self.contestants:
            progress(f"{self.title}: {contestant.num_workers} workers")
            try:
                uses.append(self._measure(contestant, progress))
            except (NotAvailableError, ProcessError) as error:
                failure = str(error)
                break
        return MemoryResult(self, uses, failure)

    def _measure(self, contestant: Contestant, progress: Callable[[str], None]) -> MemoryUse:
        with contestant.running(progress) as running:
            pid = running.server_info["pid"]
            idle = _status_bytes(pid, "VmRSS")
            for _ in range(self.steps):
                running.step()
                running.check()
                running.settle()
            return MemoryUse(
                contestant.num_workers,
                idle,
                peak=_status_bytes(pid, "VmHWM"),
                after=_status_bytes(pid, "VmRSS"),
            )


@dataclass(frozen=True)
class MemoryResult:
    """The memory use for each number of workers."""

    measurement: MemoryMeasurement
    uses: list[MemoryUse]
    failure: str | None

    def peak_in_gradients(self, use: MemoryUse) -> float:
        """Returns the peak above the idle server, in gradients."""
        return (use.peak - use.idle) / self.measurement.num_bytes

    def rest_in_gradients(self, use: MemoryUse) -> float:
        """Returns the part of the peak besides the uploads of all workers and the kept average, in gradients."""
        return self.peak_in_gradients(use) - use.num_workers - KEPT_AVERAGES

    def to_json(self) -> dict[str, Any]:
        """Returns the result for the result file; memory is in bytes."""
        return {
            "title": self.measurement.title,
            "num_bytes": self.measurement.num_bytes,
            "steps": self.measurement.steps,
            "uses": [vars(use) for use in self.uses],
            "failure": self.failure,
        }


def _status_bytes(pid: int, field: str) -> int:
    """Returns a memory field of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    match = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise ProcessError(f"/proc/{pid}/status has no {field}")
    return int(match.group(1)) * 1024
