"""The GPU benchmark says what it lacks; the rest of it needs a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.batch_norm import Result, line_of, verdicts_of
from benchmarks.harness.environments import ROOT


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_it_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.batch_norm", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this benchmark needs an NVIDIA GPU, CuPy and torch")
    assert not path.exists()


def _result(bandwidth_fraction: float, cudnn_microseconds: float | None) -> Result:
    error = None if cudnn_microseconds else "no kernel"
    shape = (32, 56, 56, 64)
    return Result("gradient", shape, "contiguous", "float32", 40, cudnn_microseconds, 25, bandwidth_fraction, error)


def test_targets_are_reached_or_missed() -> None:
    text = verdicts_of([_result(0.79, 60), _result(0.8, 30)])
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["MISSED", "reached", "reached", "MISSED"]


def test_a_refusal_of_cudnn_is_a_line_and_no_target() -> None:
    assert "cuDNN refuses: no kernel" in line_of(_result(0.9, None))
    assert "cuDNN" not in verdicts_of([_result(0.9, None)])
