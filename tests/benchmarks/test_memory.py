from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import server_memory
from benchmarks.harness.report import render


def test_the_server_memory_is_measured() -> None:
    pytest.importorskip("gradserve_server")
    for measurement in server_memory.measurements():
        small = replace(
            measurement,
            num_bytes=1_000_000,
            contestants=tuple(replace(each, options={"num_bytes": 1_000_000}) for each in measurement.contestants[:2]),
        )
        result = small.run(repeats=1, progress=lambda text: None)
        assert result.failure is None
        assert [use.num_workers for use in result.uses] == [1, 2]
        assert all(use.peak >= use.idle > 0 for use in result.uses)
        assert "gradients of 1 MB" in render(result)
