"""A round: every worker applies a gradient, and one of them takes the average.

The targets compare apply and take as two calls on either side. Reported beside them: TensorFlow with both in one
`session.run` of the taker.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import KB, MB, size_name
from benchmarks.cases.ways import BULK, GRPC, IN_PLACE, SHARED_MEMORY, WAYS
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import MALLOC_TUNED, PROJECT, TENSORFLOW, Environment
from benchmarks.harness.verdicts import Target

_TENSORFLOW = "TensorFlow"
_ONE_RUN = "TensorFlow, one run"
_NAIVE = "naive protobuf bytes"
_BARE = "bare grpcio streams, malloc tuned"
_STEPS = {4 * KB: 40, 10 * MB: 10, 100 * MB: 3}
_CASES = ((4 * KB, 2), (10 * MB, 2), (100 * MB, 2), (10 * MB, 4), (100 * MB, 4))
"""The size of a gradient, and the number of workers."""


def comparisons() -> list[Comparison]:
    """All sizes and numbers of workers."""
    return [_compare(num_bytes, num_workers) for num_bytes, num_workers in _CASES]


def small_comparisons() -> list[Comparison]:
    """The smallest round, which is all fixed costs, beside what people would write themselves, too."""
    round_ = _compare(4 * KB, 2)
    contestants = tuple(each for each in round_.contestants if each.label not in (_ONE_RUN, _BARE))
    fast, slow = (SHARED_MEMORY.label, BULK.label), GRPC.label
    targets = (
        *_beside(_TENSORFLOW, {**dict.fromkeys(fast, 3.0), slow: 1.3}),
        *_beside(_NAIVE, {**dict.fromkeys(fast, 1.5), slow: 1.0}),
    )
    return [replace(round_, title="smallest round", contestants=contestants, targets=targets)]


def _compare(num_bytes: int, num_workers: int) -> Comparison:
    def peer(label: str, environment: Environment, name: str, worker: str, **options: bool | str) -> Contestant:
        return Contestant(
            label,
            environment,
            server=f"benchmarks.peers.{name}.server",
            worker=f"benchmarks.peers.{name}.{worker}",
            num_workers=num_workers,
            options={"num_bytes": num_bytes, **options},
        )

    contestants = [way.contestant("rounds", num_workers, num_bytes=num_bytes) for way in WAYS]
    contestants.append(peer(_TENSORFLOW, TENSORFLOW, "tensorflow", "rounds", one_run=False))
    if num_workers == 2:  # with more the naive service takes many seconds
        contestants += [
            peer(_ONE_RUN, TENSORFLOW, "tensorflow", "rounds", one_run=True),
            peer(_NAIVE, PROJECT, "naive", "rounds"),
        ]
    bare = peer(_BARE, PROJECT, "ceiling", "streams", operation="round")
    return Comparison(
        title=f"round of {num_workers} workers, {size_name(num_bytes)}",
        contestants=(*contestants, replace(bare, variables=MALLOC_TUNED)),
        num_bytes=num_bytes,
        steps=_STEPS[num_bytes],
        targets=_targets(num_bytes, num_workers),
        num_own=len(WAYS),
    )


def _targets(num_bytes: int, num_workers: int) -> tuple[Target, ...]:
    if num_bytes == 4 * KB:
        return tuple(_beside(_TENSORFLOW, {SHARED_MEMORY.label: 4.0, BULK.label: 4.0, GRPC.label: 1.0}))
    targets = _beside(_TENSORFLOW, {IN_PLACE.label: 5.0, SHARED_MEMORY.label: 3.0, BULK.label: 1.6})
    return (*targets, *(_beside(_NAIVE, {BULK.label: 6.0}) if num_workers == 2 else ()))


def _beside(peer: str, speeds: dict[str, float]) -> list[Target]:
    return [Target(peer, (peer,), speed, own) for own, speed in speeds.items()]
