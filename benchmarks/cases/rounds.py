"""A round: two workers apply a gradient each, and one of them takes the average.

The targets compare apply and take as two calls on either side. Reported beside them: TensorFlow with both in one
`session.run` of the taker, and gradserve's `push_pull`, one call per worker, which gives both the average.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.comparison import Comparison, Target
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import MALLOC_TUNED, PROJECT, TENSORFLOW, Environment

KB = 1_000
MB = 1_000_000
_TENSORFLOW = "TensorFlow"
_NAIVE = "naive protobuf bytes"
_NUM_WORKERS = 2
_STEPS = {4 * KB: 40, 1 * MB: 20, 10 * MB: 10, 100 * MB: 3}
_TARGETS = {
    4 * KB: (Target(_TENSORFLOW, (_TENSORFLOW,), 1 / 1.2),),
    10 * MB: (Target(_TENSORFLOW, (_TENSORFLOW,), 0.8), Target(_NAIVE, (_NAIVE,), 4.0)),
}


def comparisons() -> list[Comparison]:
    """All sizes."""
    return [_compare(num_bytes, steps) for num_bytes, steps in _STEPS.items()]


def _compare(num_bytes: int, steps: int) -> Comparison:
    def contestant(label: str, environment: Environment, peer: str, worker: str, **options: bool | str) -> Contestant:
        return Contestant(
            label,
            environment,
            server=f"benchmarks.peers.{peer}.server",
            worker=f"benchmarks.peers.{peer}.{worker}",
            num_workers=_NUM_WORKERS,
            options={"num_bytes": num_bytes, **options},
        )

    size = f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"
    return Comparison(
        title=f"round of {_NUM_WORKERS} workers, {size}",
        contestants=(
            contestant("gradserve", PROJECT, "gradserve", "rounds"),
            contestant("gradserve push_pull, both read", PROJECT, "gradserve", "push_pull"),
            contestant(_TENSORFLOW, TENSORFLOW, "tensorflow", "rounds", one_run=False),
            contestant("TensorFlow, one run", TENSORFLOW, "tensorflow", "rounds", one_run=True),
            contestant(_NAIVE, PROJECT, "naive", "rounds"),
            replace(
                contestant("bare grpcio streams, malloc tuned", PROJECT, "ceiling", "streams", operation="round"),
                variables=MALLOC_TUNED,
            ),
        ),
        num_bytes=num_bytes,
        steps=steps,
        targets=_TARGETS.get(num_bytes, ()),
    )
