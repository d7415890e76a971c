"""A training step of the batch normalization layer, float32: the computation alone, and the whole calls.

A step is the forward pass, the gradients of the inputs, beta and gamma, and the update of the moving averages. The
computations run in a process of their own, without a server; the calls of a gradserve server are reported beside them.
"""

from __future__ import annotations

import math
import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT, TENSORFLOW
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.batch_norm_layer import SHAPES

_FUSED, _PLAIN = "TensorFlow's layer", "TensorFlow's layer, not fused"
_STEPS = 20
_FLOAT_BYTES = 4


def comparisons() -> list[Comparison]:
    """All shapes, without an activation and with one."""
    return [_compare(shape, activation) for shape in SHAPES for activation in ("", "relu")]


def _compare(shape: tuple[int, ...], activation: str) -> Comparison:
    options = {"op": "layer", "shape": shape, "activation": activation, "num_threads": os.cpu_count()}

    def tensorflow(label: str, *, fused: bool) -> Contestant:
        worker = "benchmarks.peers.tensorflow.batch_norm_layer"
        return Contestant(label, TENSORFLOW, worker=worker, options={**options, "fused": fused})

    # For rows, plain operations make the faster layer.
    peers = [tensorflow(_FUSED, fused=True), *([tensorflow(_PLAIN, fused=False)] if len(shape) == 2 else [])]
    return Comparison(
        title=f"batch norm layer, training step{activation and f' with {activation}'}, {list(shape)}",
        contestants=(
            Contestant(
                "gradserve's computation",
                PROJECT,
                worker="benchmarks.peers.gradserve.batch_norm_layer",
                options=options,
            ),
            *peers,
            Contestant(
                "gradserve calls, by handle",
                PROJECT,
                server="benchmarks.peers.gradserve.server",
                worker="benchmarks.peers.gradserve.batch_norm_layer_call",
                options=options,
            ),
        ),
        num_bytes=math.prod(shape) * _FLOAT_BYTES,
        steps=_STEPS,
        targets=(Target("TensorFlow's layer", tuple(peer.label for peer in peers), 1.0),),
    )
