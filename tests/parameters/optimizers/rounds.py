"""Rounds of a few components, some of which are absent from some rounds, and what optimizers make of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.optimizers.stepping import ComponentStep, Stepper

Array = NDArray[Any]

SHAPES: Mapping[str, tuple[int, ...]] = {"w": (5, 7), "b": (3,), "scale": ()}


@dataclass(frozen=True)
class Round:
    """The updates of a round: for each component that has some, arrays of float64 with their weights."""

    updates: Mapping[str, Sequence[tuple[Array, float]]]

    def mean(self, name: str) -> Array:
        """Returns the weighted mean of a component."""
        weights = [weight for _, weight in self.updates[name]]
        return np.asarray(sum(update * weight for update, weight in self.updates[name]) / sum(weights))


def initial_values() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def make_rounds(num_rounds: int, *, all_present: bool = False, seed: int = 11) -> list[Round]:
    """Makes rounds of one to three updates with weights; every component is absent from about a third of them."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(num_rounds):
        updates = {}
        for name, shape in SHAPES.items():
            if all_present or rng.random() > 0.3:
                num_updates = int(rng.integers(1, 4))
                draws = [np.asarray(0.3 + rng.standard_normal(shape)) for _ in range(num_updates)]
                updates[name] = [(draw, float(rng.integers(1, 20))) for draw in draws]
        rounds.append(Round(updates))
    return rounds


@dataclass
class Variables:
    """Masters and state, stepped as the server does it."""

    optimizer: Optimizer
    dtype: Any
    stepper: Stepper
    schedule: Schedule = field(default_factory=Schedule)
    deltas: bool = False
    values: dict[str, Array] = field(init=False)
    slots: dict[str, tuple[Array, ...]] = field(init=False)
    steps: dict[str, int] = field(init=False)
    num_applied: int = 0
    largest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = {name: value.astype(self.dtype) for name, value in initial_values().items()}
        self.slots = {
            name: tuple(np.full_like(value, slot.initial_value) for slot in self.optimizer.slots)
            for name, value in self.values.items()
        }
        self.steps = dict.fromkeys(self.values, 0)

    def apply(self, round_: Round) -> None:
        """Applies a round: all but the last update are in the sum, in the dtype of masters."""
        steps, results = [], {}
        for name, updates in round_.updates.items():
            *summed, (last, factor) = [(update.astype(self.dtype), weight) for update, weight in updates]
            total = None
            for update, weight in summed:
                scaled = np.asarray(update * self.dtype(weight))
                total = scaled if total is None else np.asarray(total + scaled)
            self.steps[name] += 1
            results[name] = np.full_like(self.values[name], np.nan)
            steps.append(
                ComponentStep(
                    total=total,
                    addend=np.asarray(last),
                    factor=factor,
                    divisor=sum(weight for _, weight in updates),
                    negate=self.deltas,
                    parameter=self.values[name],
                    slots=self.slots[name],
                    result=results[name],
                    step=self.steps[name],
                )
            )
        self.stepper.step(self.optimizer, self.schedule.factor(self.num_applied), steps)
        self.num_applied += 1
        self.values |= results


def assert_close(variables: Variables, expected: Mapping[str, Array], tolerance: float) -> None:
    """Checks that values differ by at most `tolerance` of the largest that their component has had, or of 1."""
    for name, value in variables.values.items():
        largest = max(float(np.abs(expected[name]).max()), variables.largest.get(name, 1.0))
        variables.largest[name] = largest
        error = float(np.abs(value.astype(np.float64) - expected[name]).max()) / largest
        assert error <= tolerance, f"{name} is off by {error:.3g}"
