from __future__ import annotations

import pytest

from benchmarks.cases.ways import GRPC
from benchmarks.harness.effort import Effort
from benchmarks.harness.memory import MemoryLimit, MemoryMeasurement
from benchmarks.harness.report import render

_NUM_BYTES = 1_000_000


@pytest.mark.parametrize(("worker", "nums_workers"), [("rounds", (1, 2)), ("push_pull", (1,))])
def test_the_server_memory_is_measured(worker: str, nums_workers: tuple[int, ...]) -> None:
    contestants = tuple(GRPC.contestant(worker, num_workers, num_bytes=_NUM_BYTES) for num_workers in nums_workers)
    limit = MemoryLimit(nums_workers[-1], 1 << 40)
    measurement = MemoryMeasurement("memory", _NUM_BYTES, contestants, steps=2, limit=limit)
    result = measurement.run(Effort(1), progress=lambda text: None)
    assert result.failure is None
    assert tuple(use.num_workers for use in result.uses) == nums_workers
    assert all(use.peak_resident >= use.peak >= use.after > use.idle > 0 for use in result.uses)
    assert "gradients of 1 MB" in render(result)
    assert [str(verdict).partition(":")[0] for verdict in result.verdicts()] == ["reached"]


def test_a_server_that_cannot_be_measured() -> None:
    bad = GRPC.contestant("rounds", 1, num_bytes=_NUM_BYTES, listen="nonsense:port")
    measurement = MemoryMeasurement("memory", _NUM_BYTES, (bad,), steps=1, limit=MemoryLimit(1, 1 << 40))
    result = measurement.run(Effort(1), progress=lambda text: None)
    assert result.failure is not None
    assert result.failure in render(result)
    assert [str(verdict).partition(":")[0] for verdict in result.verdicts()] == ["not measured"]
