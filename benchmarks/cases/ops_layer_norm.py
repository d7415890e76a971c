"""LayerNorm and its gradient on the host, float32: the kernels alone.

gradserve's kernels and PyTorch's each run in a process of their own, without a server.
"""

from __future__ import annotations

import math
import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO, PROJECT, Environment
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.layer_norm import SHAPES

_TORCH = "PyTorch's kernel"
_FLOAT_BYTES = 4
_STEPS = 50


def comparisons() -> list[Comparison]:
    """Both ops, in all shapes."""
    return [_compare(op, shape) for op in ("gradient", "forward") for shape in SHAPES]


def _compare(op: str, shape: tuple[int, int]) -> Comparison:
    options = {"op": op, "shape": shape, "num_threads": len(os.sched_getaffinity(0))}

    def kernel(label: str, environment: Environment, worker: str) -> Contestant:
        return Contestant(label, environment, worker=f"benchmarks.peers.{worker}.layer_norm", options=options)

    return Comparison(
        title=f"layer norm {op}, {shape[0]} groups of {shape[1]}",
        contestants=(
            kernel("gradserve's kernel", PROJECT, "gradserve"),
            kernel(_TORCH, GLOO, "pytorch"),
        ),
        num_bytes=math.prod(shape) * _FLOAT_BYTES,
        steps=_STEPS,
        targets=(Target(_TORCH, (_TORCH,), 1.0),),
    )
