"""All 161 gradients of a ResNet-50, averaged over the workers, beside TensorFlow and gloo."""

from __future__ import annotations

import math

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO, PROJECT, TENSORFLOW
from benchmarks.workloads.resnet50 import parameter_shapes

_BUCKET_BYTES = 25 * 2**20
_STEPS = 3


def comparisons() -> list[Comparison]:
    """Two workers and four."""
    return [_compare(num_workers) for num_workers in (2, 4)]


def _compare(num_workers: int) -> Comparison:
    def tensorflow(label: str, *, everybody_reads: bool) -> Contestant:
        return Contestant(
            label,
            TENSORFLOW,
            server="benchmarks.peers.tensorflow.server",
            worker="benchmarks.peers.tensorflow.resnet50",
            num_workers=num_workers,
            options={"everybody_reads": everybody_reads},
        )

    def gloo(label: str, bucket_bytes: int | None) -> Contestant:
        return Contestant(
            label,
            GLOO,
            worker="benchmarks.peers.gloo.resnet50",
            num_workers=num_workers,
            options={"bucket_bytes": bucket_bytes},
        )

    return Comparison(
        title=f"ResNet-50 gradients, {num_workers} workers",
        contestants=(
            Contestant(
                "gradserve push_pull, all read",
                PROJECT,
                server="benchmarks.peers.gradserve.server",
                worker="benchmarks.peers.gradserve.push_pull",
                num_workers=num_workers,
            ),
            tensorflow("TensorFlow, all read", everybody_reads=True),
            tensorflow("TensorFlow, one reads", everybody_reads=False),
            gloo("gloo, 25 MB buckets, all read", _BUCKET_BYTES),
            gloo("gloo, one by one, all read", None),
        ),
        num_bytes=4 * sum(math.prod(shape) for shape in parameter_shapes().values()),
        steps=_STEPS,
    )
