"""Rounds of parameters on the server, beside a mean alone, and beside TensorFlow's parameter server."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import KB, MB, size_name
from benchmarks.cases.ways import BULK, IN_PLACE, SHARED_MEMORY, Way
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import TENSORFLOW
from benchmarks.harness.memory import MemoryLimit, MemoryMeasurement
from benchmarks.harness.verdicts import Target

_NUM_BYTES = 100 * MB
_STEPS = 3
_MEAN = "mean alone"
_CHECKED_MEAN = "mean alone, which refuses values that are not finite, as parameters do"
_SLOWER = {"momentum": 1.5, "adam": 2.5}
"""The longest time of a round with each optimizer, as a multiple of the mean's."""
_TENSORFLOW = "TensorFlow, momentum"
_SPEEDS = {IN_PLACE: 5.0, BULK: 1.6}
_MOST_WORKERS = 8
_KEPT_VERSIONS = 2
_SMALL_BYTES = 4 * KB
_SMALL_STEPS = 5
_NUM_WAITING = 10_000


def comparisons() -> list[Comparison]:
    """Beside a mean alone."""
    return [_beside_mean()]


def comparisons_with_tensorflow() -> list[Comparison]:
    """Beside TensorFlow, with two workers and four."""
    return [_beside_tensorflow(num_workers) for num_workers in (2, 4)]


def small_comparisons() -> list[Comparison]:
    """Twenty small calls: beside an accumulator's, and while thousands wait for a version."""

    def contestant(label: str, kind: str, num_waiting: int = 0) -> Contestant:
        made = BULK.contestant("small_updates", 1, num_bytes=_SMALL_BYTES, kind=kind, num_waiting=num_waiting)
        return replace(made, label=label)

    apply = contestant("apply_grad", "apply_grad")
    push = contestant("push", "updates")
    rounds = contestant("push that ends its round", "rounds")
    waiting = contestant(f"push that ends its round, {_NUM_WAITING:,} wait for a step", "rounds", _NUM_WAITING)
    return [
        Comparison(
            title=f"20 calls with {size_name(_SMALL_BYTES)}",
            contestants=(waiting, rounds, push, apply),
            num_bytes=_SMALL_BYTES,
            steps=_SMALL_STEPS,
        )
    ]


def measurements() -> list[MemoryMeasurement]:
    """The server's memory with Adam: the sum, the next version and two slots, besides the versions kept."""
    limit = MemoryLimit(_MOST_WORKERS, (5 + _KEPT_VERSIONS) * _NUM_BYTES, is_whole=True)
    return [
        MemoryMeasurement(
            title="server memory, parameters with Adam",
            num_bytes=_NUM_BYTES,
            contestants=(_contestant(way, "adam", _MOST_WORKERS),),
            steps=_STEPS,
            limit=limit,
        )
        for way in (IN_PLACE, SHARED_MEMORY)
    ]


def _contestant(way: Way, optimizer: str, num_workers: int, *, checks: bool = True) -> Contestant:
    made = way.contestant(
        "parameters",
        num_workers,
        num_bytes=_NUM_BYTES,
        optimizer=optimizer,
        refuse_non_finite=checks,
        warm_up=True,
    )
    return replace(made, label=f"{way.label}, {optimizer}" + ("" if checks else ", unchecked"))


def _beside_mean() -> Comparison:
    means = {
        checks: replace(
            IN_PLACE.contestant("push_pull", 2, num_bytes=_NUM_BYTES, refuse_non_finite=checks, warm_up=True),
            label=label,
        )
        for label, checks in ((_MEAN, False), (_CHECKED_MEAN, True))
    }
    own = {
        (optimizer, checks): _contestant(IN_PLACE, optimizer, 2, checks=checks)
        for checks in means
        for optimizer in _SLOWER
    }
    return Comparison(
        title=f"parameters of {size_name(_NUM_BYTES)}, 2 workers, beside a mean alone",
        contestants=(*own.values(), *means.values()),
        num_bytes=_NUM_BYTES,
        steps=_STEPS,
        # Each beside the mean that checks as much; those that check, as they do by default, also beside the other one.
        targets=tuple(
            Target(mean.label, (mean.label,), 1 / _SLOWER[optimizer], each.label)
            for mean_checks, mean in means.items()
            for (optimizer, checks), each in own.items()
            if checks or not mean_checks
        ),
        num_own=len(own),
    )


def _beside_tensorflow(num_workers: int) -> Comparison:
    tensorflow = Contestant(
        _TENSORFLOW,
        TENSORFLOW,
        server="benchmarks.peers.tensorflow.server",
        worker="benchmarks.peers.tensorflow.parameters",
        num_workers=num_workers,
        options={"num_bytes": _NUM_BYTES},
    )
    ways = (IN_PLACE, SHARED_MEMORY, BULK)
    own = {way: _contestant(way, "momentum", num_workers) for way in ways}
    return Comparison(
        title=f"parameters of {size_name(_NUM_BYTES)}, {num_workers} workers, beside TensorFlow's parameter server",
        contestants=(*own.values(), tensorflow),
        num_bytes=_NUM_BYTES,
        steps=_STEPS,
        targets=tuple(Target(_TENSORFLOW, (_TENSORFLOW,), speed, own[way].label) for way, speed in _SPEEDS.items()),
        num_own=len(own),
    )
