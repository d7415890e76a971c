"""The price of durability, beside what the disk alone takes for the same bytes."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases.sizes import MB, size_name
from benchmarks.cases.ways import IN_PLACE
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.verdicts import Target

_NUM_GRADIENTS = 4
_STEPS = 4
_DISK = "the disk alone"
_NONE, _ROUND, _GRADIENT = (f"gradserve, durability {level!r}" for level in ("none", "round", "gradient"))
_ALLOWED = "gradserve, 'none', and 1.5 gradients and one flush to a file"


def comparisons() -> list[Comparison]:
    """Rounds at each level, and gradients that are written one by one."""
    return [*(_rounds(num_bytes) for num_bytes in (10 * MB, 100 * MB)), _gradients(100 * MB)]


def _rounds(num_bytes: int) -> Comparison:
    return Comparison(
        title=f"durable round of 1 worker, {size_name(num_bytes)}",
        contestants=(
            _own(_ROUND, "round", num_bytes),
            _own(_GRADIENT, "gradient", num_bytes),
            _own(_NONE, "none", num_bytes),
            _own(_ALLOWED, "none", num_bytes, written=1.5),
        ),
        num_bytes=num_bytes,
        steps=_STEPS,
        targets=(Target("a round without durability, and 1.5 gradients to the disk", (_ALLOWED,), 1.0, _ROUND),),
        num_own=2,
    )


def _gradients(num_bytes: int) -> Comparison:
    disk = Contestant(
        _DISK,
        PROJECT,
        worker="benchmarks.peers.disk.writes",
        options={"num_bytes": num_bytes, "num_gradients": _NUM_GRADIENTS},
    )
    return Comparison(
        title=f"{_NUM_GRADIENTS} durable gradients, {size_name(num_bytes)} each",
        contestants=(_own(_GRADIENT, "gradient", num_bytes, num_gradients=_NUM_GRADIENTS), disk),
        num_bytes=num_bytes * _NUM_GRADIENTS,
        steps=_STEPS,
        targets=(Target(_DISK, (_DISK,), 0.7),),
        num_own=1,
    )


def _own(label: str, durability: str, num_bytes: int, *, num_gradients: int = 1, written: float = 0.0) -> Contestant:
    contestant = IN_PLACE.contestant(
        "durable", 1, num_bytes=num_bytes, durability=durability, num_gradients=num_gradients, written=written
    )
    return replace(contestant, label=label)
