"""GRUBlockCell and its gradient, float32: the kernel alone, and the whole call.

The kernels of the peers run in a process of their own, without a server, as gradserve's does; the calls of a
gradserve server are reported beside them.
"""

from __future__ import annotations

import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT, TENSORFLOW, Environment
from benchmarks.harness.verdicts import Target

_TENSORFLOW = "TensorFlow's kernel"
_SIZES = ((128, 512, 512), (32, 256, 256), (1, 1024, 1024))
"""The batch, inputs and cells of each size."""
_STEPS = 20
_FLOAT_BYTES = 4


def comparisons() -> list[Comparison]:
    """Both ops in all sizes."""
    return [_compare(op, *sizes) for op in ("gradient", "forward") for sizes in _SIZES]


def _compare(op: str, batch: int, inputs: int, cells: int) -> Comparison:
    options = {"op": op, "batch": batch, "inputs": inputs, "cells": cells, "num_threads": os.cpu_count()}

    def kernel(label: str, environment: Environment, worker: str) -> Contestant:
        return Contestant(label, environment, worker=f"benchmarks.peers.{worker}", options=options)

    def call(label: str, *, by_handle: bool) -> Contestant:
        return Contestant(
            label,
            PROJECT,
            server="benchmarks.peers.gradserve.server",
            worker="benchmarks.peers.gradserve.gru_block_cell_call",
            options={**options, "by_handle": by_handle},
        )

    return Comparison(
        title=f"GRU block cell {op}, batch {batch}, {inputs} inputs, {cells} cells",
        contestants=(
            kernel("gradserve's kernel", PROJECT, "gradserve.gru_block_cell"),
            kernel(_TENSORFLOW, TENSORFLOW, "tensorflow.gru_block_cell"),
            call("gradserve call, arrays over the wire", by_handle=False),
            call("gradserve call, by handle", by_handle=True),
        ),
        num_bytes=(inputs + cells) * 3 * cells * _FLOAT_BYTES,
        steps=_STEPS,
        targets=(Target(_TENSORFLOW, (_TENSORFLOW,), 1.0),) if op == "gradient" else (),
    )
