"""The GPU benchmark of recurrent networks says what it lacks and judges; the rest of it needs a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.rnn import SIZES, Result, Size, line_of, tensors_of, verdicts_of
from benchmarks.harness.environments import ROOT


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_it_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.rnn", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this benchmark needs an NVIDIA GPU, CuPy and torch")
    assert not path.exists()


def test_targets_are_reached_or_missed() -> None:
    results = [Result("step", "lstm 1x1 50x64x128", "float32", ours, 100) for ours in (105, 106)]
    assert [line.split(":")[0].strip() for line in verdicts_of(results).splitlines()[1:]] == ["reached", "MISSED"]
    assert line_of(results[0]).endswith("1.050 times torch's")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_parameters_fit_the_network(size: Size) -> None:
    problem = dataclasses.replace(size, batch=1, max_seq_length=1).problem("float16")
    tensors = tensors_of(problem)
    assert tensors.params.shape == (problem.network.num_params,)
    assert {array.dtype for array in vars(tensors).values()} == {np.dtype(np.float16)}
