"""`push_pull` of one array: every worker adds its gradient and gets the average, beside gloo's all-reduce."""

from __future__ import annotations

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import IN_PLACE, SHARED_MEMORY, WAYS
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import GLOO
from benchmarks.harness.verdicts import Target

_GLOO = "gloo all_reduce"
_STEPS = {10 * MB: 10, 100 * MB: 3}


def comparisons() -> list[Comparison]:
    """All sizes, with two workers and four."""
    return [_compare(num_bytes, num_workers) for num_workers in (2, 4) for num_bytes in _STEPS]


def _compare(num_bytes: int, num_workers: int) -> Comparison:
    gloo = Contestant(
        _GLOO,
        GLOO,
        worker="benchmarks.peers.gloo.all_reduce",
        num_workers=num_workers,
        options={"num_bytes": num_bytes, "bucket_bytes": None},
    )
    return Comparison(
        title=f"push_pull of {num_workers} workers, {size_name(num_bytes)}",
        contestants=(*(way.contestant("push_pull", num_workers, num_bytes=num_bytes) for way in WAYS), gloo),
        num_bytes=num_bytes,
        steps=_STEPS[num_bytes],
        targets=(Target(_GLOO, (_GLOO,), 2.0, IN_PLACE.label), Target(_GLOO, (_GLOO,), 1.2, SHARED_MEMORY.label)),
        num_own=len(WAYS),
    )
