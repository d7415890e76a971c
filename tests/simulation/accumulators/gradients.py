"""Gradients that can be told apart in a sum, and whose sum tells in which order they were added."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.accumulators.gradient import Average, Gradient, SparseSlices, Value
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, Reduction
from gradserve_server.storage.journal import Durability

MOST = 256
"""The most gradients that can be told apart."""
_NOISE = 1300


def spec_of(durability: Durability, *, sparse: bool, deterministic: bool) -> AccumulatorSpec:
    """Returns the spec of an accumulator for such gradients."""
    who = ComponentSpec("who", np.dtype(np.float32), layout=Layout.SPARSE if sparse else Layout.DENSE)
    return AccumulatorSpec(
        (who, ComponentSpec("noise", np.dtype(np.float32))),
        reduction=Reduction.SUM,
        keep_averages=2,
        deterministic=deterministic,
        durability=durability,
        agreement={"run": "simulated"},
    )


@lru_cache(MOST)
def noise(number: int) -> NDArray[np.float32]:
    """Returns values whose sums tell in which order they were added."""
    values = np.random.default_rng(number).normal(size=_NOISE).astype(np.float32)
    values.flags.writeable = False
    return values


def gradient_of(number: int, *, sparse: bool) -> Gradient:
    """Returns a gradient that has a 1 where no other one has."""
    who: Value
    if sparse:
        who = SparseSlices(np.array([number]), np.ones(1, np.float32))
    else:
        who = np.zeros(MOST, np.float32)
        who[number] = 1
    return Gradient({"who": who, "noise": noise(number)})


def given_away(gradient: Gradient) -> Gradient:
    """Returns a copy, whose memory the accumulator may take over: it waits until the disk has that, before others."""
    values: dict[str, Value] = dict(gradient.sparse)
    values.update({name: value.copy() for name, value in gradient.dense.items()})
    return Gradient(values, owned=True)


def members_of(average: Average) -> dict[int, float]:
    """Returns how often each gradient is in a sum."""
    who = average.values["who"]
    if isinstance(who, SparseSlices):
        return dict(zip(who.indices.tolist(), who.values.tolist(), strict=True))
    return {int(number): float(who[number]) for number in np.flatnonzero(who)}


def has_noise_of(average: Average, numbers: Sequence[int]) -> bool:
    """Returns True if a sum has the bits that adding these gradients in this order gives."""
    total = noise(numbers[0])
    for number in numbers[1:]:
        total = total + noise(number)
    found: Any = average.values["noise"]
    return bool(found.tobytes() == total.tobytes())


def bits_of(arrays: Iterable[Any]) -> bytes:
    """Returns the bits of arrays."""
    return b"".join(each.tobytes() for each in arrays)
