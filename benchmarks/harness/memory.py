"""The memory that gradserve's server adds to the machine, at its peak, for growing numbers of workers.

Memory that workers share with the server counts as resident in both. It is theirs: the server's own memory is what is
resident in it except for the files in memory that a worker has mapped for writing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import NotAvailableError
from benchmarks.harness.process_memory import own_bytes, status_bytes
from benchmarks.harness.processes import ProcessError
from benchmarks.harness.verdicts import LimitVerdict

_MB = 1e6
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class MemoryLimit:
    """The most memory above the idle server with some number of workers.

    Attributes:
        num_workers: The number of workers.
        num_bytes: The most bytes.
        is_whole: Whether the limit is for all of the server's memory instead, which an idle server has a part of.
    """

    num_workers: int
    num_bytes: int
    is_whole: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one server, in bytes.

    Attributes:
        num_workers: The number of workers.
        idle: Its own memory with all workers connected and the accumulator made, before the first gradient.
        peak: The most memory of its own in all rounds, by samples.
        after: Its own memory after the last round, with nothing under way: the server keeps freed buffers.
        peak_resident: The most resident memory in all rounds, with the memory of workers that it has mapped.
    """

    num_workers: int
    idle: int
    peak: int
    after: int
    peak_resident: int


@dataclass(frozen=True)
class MemoryMeasurement:
    """The same rounds, with a fresh server for each number of workers."""

    title: str
    num_bytes: int
    """The payload of one gradient."""
    contestants: tuple[Contestant, ...]
    """gradserve with each number of workers."""
    steps: int
    limit: MemoryLimit | None = None

    def run(self, effort: Effort, progress: Callable[[str], None]) -> MemoryResult:
        """Measures each number of workers once; a peak needs no repetitions."""
        uses = []
        failure = None
        for contestant in self.contestants:
            progress(f"{self.title}: {contestant.label}, {contestant.num_workers} workers")
            try:
                uses.append(self._measure(contestant, progress))
            except (NotAvailableError, ProcessError) as error:
                failure = str(error)
                break
        return MemoryResult(self, uses, failure)

    def _measure(self, contestant: Contestant, progress: Callable[[str], None]) -> MemoryUse:
        with contestant.running(progress) as running:
            pid, workers = running.server_info["pid"], [worker.pid for worker in running.workers]
            idle = own_bytes(pid, workers)
            with _sampling(pid, workers) as samples:
                for _ in range(self.steps):
                    running.step()
                    running.check()
                    running.settle()
            return MemoryUse(
                contestant.num_workers,
                idle=idle,
                peak=max(samples),
                after=own_bytes(pid, workers),
                peak_resident=status_bytes(pid, "VmHWM"),
            )


@dataclass(frozen=True)
class MemoryResult:
    """The memory use for each number of workers."""

    measurement: MemoryMeasurement
    uses: list[MemoryUse]
    failure: str | None

    def verdicts(self) -> list[LimitVerdict]:
        """Returns a verdict if there is a limit."""
        limit = self.measurement.limit
        if limit is None:
            return []
        peaks = [
            use.peak - use.idle * (not limit.is_whole) for use in self.uses if use.num_workers == limit.num_workers
        ]
        measured = peaks[0] / _MB if peaks else None
        label = self.measurement.contestants[0].label
        return [LimitVerdict(self.measurement.title, label, "MB", limit.num_bytes / _MB, measured)]

    def to_json(self) -> dict[str, Any]:
        """Returns the result for the result file; memory is in bytes."""
        return {
            "title": self.measurement.title,
            "label": self.measurement.contestants[0].label,
            "num_bytes": self.measurement.num_bytes,
            "steps": self.measurement.steps,
            "uses": [vars(use) for use in self.uses],
            "failure": self.failure,
            "targets": [verdict.to_json() for verdict in self.verdicts()],
        }


@contextlib.contextmanager
def _sampling(pid: int, workers: list[int]) -> Iterator[list[int]]:
    """Looks at a server's own memory again and again until the end of the block; the last look is after it."""
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            samples.append(own_bytes(pid, workers))

    thread = threading.Thread(target=sample, name="memory-samples")
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        samples.append(own_bytes(pid, workers))
