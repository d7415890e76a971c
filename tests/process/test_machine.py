from pathlib import Path

import psutil
import pytest

from gradserve_server.runtime.process import memory_bytes, num_cores

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize(("limit", "expected"), [("max\n", TOTAL), ("1048576\n", 1 << 20), (None, TOTAL), ("", TOTAL)])
def test_memory(tmp_path: Path, limit: str | None, expected: int) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert memory_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("limit", "most"), [("max 100000\n", 10**6), ("100000 100000\n", 1), ("5000 100000\n", 1), (None, 10**6)]
)
def test_cores(tmp_path: Path, limit: str | None, most: int) -> None:
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert 1 <= num_cores(tmp_path) <= most
