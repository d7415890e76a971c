"""Rounds of parameters on the server, beside a mean alone, and beside TensorFlow's parameter server."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import BULK, IN_PLACE, SHARED_MEMORY, Way
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import TENSORFLOW
from benchmarks.harness.memory import MemoryLimit, MemoryMeasurement
from benchmarks.harness.verdicts import Target

_NUM_BYTES = 100 * MB
_STEPS = 3
_MEAN = "mean alone"
_SLOWER = {"momentum": 1.5, "adam": 2.5}
"""The longest time of a round with each optimizer, as a multiple of the mean's."""
_TENSORFLOW = "TensorFlow, momentum"
_SPEEDS = {IN_PLACE: 5.0, BULK: 1.6}
_MOST_WORKERS = 8
_KEPT_VERSIONS = 2


def comparisons() -> list[Comparison]:
    """Beside a mean alone, and beside TensorFlow with two workers and four."""
    return [_beside_mean(), *(_beside_tensorflow(num_workers) for num_workers in (2, 4))]


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


def _contestant(way: Way, optimizer: str, num_workers: int) -> Contestant:
    made = way.contestant("parameters", num_workers, num_bytes=_NUM_BYTES, optimizer=optimizer)
    return replace(made, label=f"{way.label}, {optimizer}")


def _beside_mean() -> Comparison:
    mean = replace(IN_PLACE.contestant("push_pull", 2, num_bytes=_NUM_BYTES), label=_MEAN)
    own = {optimizer: _contestant(IN_PLACE, optimizer, 2) for optimizer in _SLOWER}
    return Comparison(
        title=f"parameters of {size_name(_NUM_BYTES)}, 2 workers, beside a mean alone",
        contestants=(*own.values(), mean),
        num_bytes=_NUM_BYTES,
        steps=_STEPS,
        targets=tuple(
            Target(_MEAN, (_MEAN,), 1 / slower, own[optimizer].label) for optimizer, slower in _SLOWER.items()
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
