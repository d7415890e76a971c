"""Optax's Yogi.

    m = beta1 m + (1 - beta1) g
    v -= (1 - beta2) sign(v - g g) g g
    p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

Both m and v begin with the initial accumulator value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradserve_server.parameters.optimizers.optimizer import (
    FRACTION,
    NUMBER,
    Array,
    Loop,
    LoopCode,
    Optimizer,
    Slot,
    power,
)


@dataclass(frozen=True)
class Yogi(Optimizer):
    """The settings of Optax's Yogi."""

    lr: float = field(metadata=NUMBER)
    beta1: float = field(metadata=FRACTION)
    beta2: float = field(metadata=FRACTION)
    eps: float = field(metadata=NUMBER)
    initial_accumulator_value: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.lr

    @property
    def slots(self) -> tuple[Slot, ...]:
        value = self.initial_accumulator_value
        return Slot("exp_avg", value), Slot("exp_avg_sq", value)

    @property
    def loop(self) -> Loop:
        return YOGI

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        corrections = 1.0 - power(self.beta1, step), 1.0 - power(self.beta2, step)
        return yogi_numbers(self.lr * lr_factor, self.beta1, self.beta2, self.eps, corrections)


def yogi_numbers(
    lr: float, beta1: float, beta2: float, eps: float, corrections: tuple[float, float] = (1.0, 1.0)
) -> tuple[float, ...]:
    """Returns the numbers of `YOGI`."""
    return lr, beta1, 1.0 - beta1, 1.0 - beta2, *corrections, eps


def _yogi(gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]) -> None:
    (m, v), (lr, beta1, fresh, fresh_square, correction, square_correction, eps) = slots, numbers
    np.add(beta1 * m, fresh * gradient, out=m)
    square = gradient * gradient
    np.subtract(v, np.sign(v - square) * (fresh_square * square), out=v)
    denominator = np.sqrt(v / square_correction) + eps
    np.subtract(parameter, lr * (m / correction / denominator), out=result)


YOGI = Loop(LoopCode.YOGI, _yogi)
