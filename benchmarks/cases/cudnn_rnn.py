"""CudnnRNN and CudnnRNNBackprop on the host, float32: forward and backward in training, the kernels alone.

gradserve's kernels and PyTorch's modules each run in a process of their own, without a server.
"""

from __future__ import annotations

import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO, PROJECT, Environment
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.cudnn_rnn import LAYERS, NUM_GATES, STEPS, UNITS

_TORCH = "PyTorch's module"
_FLOAT_BYTES = 4
_STEPS_BY_BATCH = {64: 5, 1: 50}
"""The steps in a repetition, by batch: about a second."""


def comparisons() -> list[Comparison]:
    """All modes, with a large batch and with one sequence."""
    return [_compare(mode, batch) for batch in _STEPS_BY_BATCH for mode in NUM_GATES]


def _compare(mode: str, batch: int) -> Comparison:
    options = {"mode": mode, "batch": batch, "num_threads": len(os.sched_getaffinity(0))}

    def contestant(label: str, environment: Environment, worker: str) -> Contestant:
        return Contestant(label, environment, worker=f"benchmarks.peers.{worker}.cudnn_rnn", options=options)

    return Comparison(
        title=f"CudnnRNN forward and backward, {mode}, {STEPS} steps of {batch}, {UNITS} units, {LAYERS} layers",
        contestants=(
            contestant("gradserve's kernels", PROJECT, "gradserve"),
            contestant(_TORCH, GLOO, "pytorch"),
        ),
        num_bytes=STEPS * batch * UNITS * _FLOAT_BYTES,
        steps=_STEPS_BY_BATCH[batch],
        targets=(Target(_TORCH, (_TORCH,), 1.0),),
    )
