"""PyTorch's Adam and AdamW.

g += weight_decay p, or with AdamW p *= 1 - lr weight_decay
m += (1 - beta1) (g - m)
v = beta2 v + (1 - beta2) g g
p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
"""

import math
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
    with_decay,
)

MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))


@dataclass(frozen=True)
class Adam(Optimizer):
    """The settings of Adam, or with `decoupled` of AdamW."""

    lr: float = field(metadata=NUMBER)
    beta1: float = field(metadata=FRACTION)
    beta2: float = field(metadata=FRACTION)
    eps: float = field(metadata=NUMBER)
    weight_decay: float = field(metadata=NUMBER)
    decoupled: bool

    @property
    def learning_rate(self) -> float:
        return self.lr

    @property
    def slots(self) -> tuple[Slot, ...]:
        return MOMENTS

    @property
    def loop(self) -> Loop:
        return ADAM

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        lr = self.lr * lr_factor
        return adam_numbers(
            rate=lr / (1.0 - power(self.beta1, step)),
            beta1=self.beta1,
            beta2=self.beta2,
            correction=math.sqrt(1.0 - power(self.beta2, step)),
            eps=self.eps,
            weight_decay=0.0 if self.decoupled else self.weight_decay,
            kept=1.0 - lr * self.weight_decay if self.decoupled else 1.0,
        )


def adam_numbers(
    *,
    rate: float,
    beta1: float,
    beta2: float,
    correction: float,
    eps: float,
    weight_decay: float = 0.0,
    kept: float = 1.0,
) -> tuple[float, ...]:
    """Returns the numbers of `ADAM`, which computes p = kept p - rate m / (sqrt(v) / correction + eps)."""
    weight = 1.0 - beta1
    return rate, weight_decay, kept, weight, 1.0 - weight, beta2, 1.0 - beta2, correction, eps


def _adam(gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]) -> None:
    (m, v), (rate, weight_decay, kept, weight, rest, beta2, fresh, correction, eps) = slots, numbers
    gradient = with_decay(gradient, parameter, weight_decay)
    # As PyTorch's lerp, which is exact at both ends.
    if weight < 0.5:
        np.add(m, weight * (gradient - m), out=m)
    else:
        np.subtract(gradient, rest * (gradient - m), out=m)
    np.add(beta2 * v, fresh * gradient * gradient, out=v)
    denominator = np.sqrt(v) / correction + eps
    np.subtract(kept * parameter, rate * m / denominator, out=result)


ADAM = Loop(LoopCode.ADAM, _adam)
