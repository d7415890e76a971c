"""All 161 gradients of a ResNet-50, averaged over the workers, beside TensorFlow and gloo."""

from __future__ import annotations

import math

from benchmarks.cases.ways import BULK, IN_PLACE, WAYS
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO, TENSORFLOW
from benchmarks.harness.verdicts import Target
from benchmarks.workloads.resnet50 import parameter_shapes

_TENSORFLOW, _GLOO = "TensorFlow, all read", "gloo, 25 MB buckets, all read"
_BUCKET_BYTES = 25 * 2**20
_NUM_WORKERS = 4
_STEPS = 3
_TARGETS = (
    Target("TensorFlow", (_TENSORFLOW,), 3.0, IN_PLACE.label),
    Target("gloo in buckets", (_GLOO,), 1.5, IN_PLACE.label),
    Target("TensorFlow", (_TENSORFLOW,), 1.2, BULK.label),
    Target("gloo in buckets", (_GLOO,), 1.0, BULK.label),
)


def comparisons() -> list[Comparison]:
    """Four workers."""
    return [_compare()]


def _compare() -> Comparison:
    def tensorflow(label: str, *, everybody_reads: bool) -> Contestant:
        return Contestant(
            label,
            TENSORFLOW,
            server="benchmarks.peers.tensorflow.server",
            worker="benchmarks.peers.tensorflow.resnet50",
            num_workers=_NUM_WORKERS,
            options={"everybody_reads": everybody_reads},
        )

    def gloo(label: str, bucket_bytes: int | None) -> Contestant:
        return Contestant(
            label,
            GLOO,
            worker="benchmarks.peers.gloo.all_reduce",
            num_workers=_NUM_WORKERS,
            options={"bucket_bytes": bucket_bytes},
        )

    return Comparison(
        title=f"ResNet-50 gradients, {_NUM_WORKERS} workers, push_pull",
        contestants=(
            *(way.contestant("push_pull", _NUM_WORKERS) for way in WAYS),
            tensorflow(_TENSORFLOW, everybody_reads=True),
            tensorflow("TensorFlow, one reads", everybody_reads=False),
            gloo(_GLOO, _BUCKET_BYTES),
            gloo("gloo, one by one, all read", None),
        ),
        num_bytes=4 * sum(math.prod(shape) for shape in parameter_shapes().values()),
        steps=_STEPS,
        targets=_TARGETS,
        num_own=len(WAYS),
    )
