"""FusedBatchNorm and its gradient in training, float32: the kernel alone, and the whole call.

The kernels of the peers run in a process of their own, without a server, as gradserve's does; the calls of a
gradserve server are reported beside them.
"""

from __future__ import annotations

import math
import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO, PROJECT, TENSORFLOW, Environment
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.batch_norm import SHAPES

_TENSORFLOW, _TORCH = "TensorFlow's kernel", "PyTorch's kernel"
_STEPS = 20
_FLOAT_BYTES = 4


def comparisons() -> list[Comparison]:
    """Both ops, in both formats, in all shapes."""
    return [
        _compare(op, data_format, shape)
        for op in ("gradient", "forward")
        for data_format in ("NHWC", "NCHW")
        for shape in SHAPES
    ]


def _compare(op: str, data_format: str, shape: tuple[int, ...]) -> Comparison:
    options = {"op": op, "data_format": data_format, "shape": shape, "num_threads": os.cpu_count()}

    def kernel(label: str, environment: Environment, worker: str) -> Contestant:
        return Contestant(label, environment, worker=f"benchmarks.peers.{worker}", options=options)

    def call(label: str, *, by_handle: bool) -> Contestant:
        return Contestant(
            label,
            PROJECT,
            server="benchmarks.peers.gradserve.server",
            worker="benchmarks.peers.gradserve.batch_norm_call",
            options={**options, "by_handle": by_handle},
        )

    targets = [Target(_TENSORFLOW, (_TENSORFLOW,), 1.0)]
    if data_format == "NCHW":
        targets.append(Target(_TORCH, (_TORCH,), 2.0))
    return Comparison(
        title=f"batch norm {op}, {data_format}, {list(shape)} as NHWC",
        contestants=(
            kernel("gradserve's kernel", PROJECT, "gradserve.batch_norm_kernel"),
            kernel(_TENSORFLOW, TENSORFLOW, "tensorflow.batch_norm"),
            kernel(_TORCH, GLOO, "pytorch.batch_norm"),
            call("gradserve call, arrays over the wire", by_handle=False),
            call("gradserve call, by handle", by_handle=True),
        ),
        num_bytes=math.prod(shape) * _FLOAT_BYTES,
        steps=_STEPS,
        targets=tuple(targets),
    )
