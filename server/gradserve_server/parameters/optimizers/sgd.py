"""PyTorch's SGD.

    g += weight_decay p
    buf = g in the first round, momentum buf + (1 - dampening) g later
    g = g + momentum buf with nesterov, else buf
    p -= lr g

Without momentum there is no buf.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradserve_server.parameters.optimizers.optimizer import (
    NUMBER,
    Array,
    Loop,
    LoopCode,
    Optimizer,
    Slot,
    setting_error,
    with_decay,
)


@dataclass(frozen=True)
class Sgd(Optimizer):
    """The settings of SGD; `nesterov` needs a momentum and no dampening."""

    lr: float = field(metadata=NUMBER)
    momentum: float = field(metadata=NUMBER)
    dampening: float = field(metadata=NUMBER)
    weight_decay: float = field(metadata=NUMBER)
    nesterov: bool

    def __post_init__(self) -> None:
        """Checks all settings."""
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise setting_error("nesterov", "expected a momentum with nesterov, got momentum 0")
        if self.nesterov and self.dampening:
            raise setting_error("nesterov", f"expected dampening 0 with nesterov, got {self.dampening!r}")

    @property
    def learning_rate(self) -> float:
        return self.lr

    @property
    def slots(self) -> tuple[Slot, ...]:
        return momentum_slots(self.momentum)

    @property
    def loop(self) -> Loop:
        return MOMENTUM if self.momentum else SGD

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        lr = self.lr * lr_factor
        if not self.momentum:
            return lr, self.weight_decay
        ahead = self.momentum if self.nesterov else 0.0
        return momentum_numbers(step, lr, self.momentum, self.dampening, self.weight_decay, ahead)


def momentum_slots(momentum: float) -> tuple[Slot, ...]:
    """Returns the slots of SGD."""
    return (Slot("momentum_buffer"),) if momentum else ()


def momentum_numbers(
    step: int, lr: float, momentum: float, dampening: float = 0.0, weight_decay: float = 0.0, ahead: float = 0.0
) -> tuple[float, ...]:
    """Returns the numbers of `MOMENTUM`.

    In the first round buf = 0 buf + 1 g, which is g, because buf is 0 before it.
    """
    decay, fresh = (0.0, 1.0) if step == 1 else (momentum, 1.0 - dampening)
    return lr, weight_decay, decay, fresh, ahead


def _sgd(gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]) -> None:
    lr, weight_decay = numbers
    gradient = with_decay(gradient, parameter, weight_decay)
    np.subtract(parameter, lr * gradient, out=result)


def _momentum(gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]) -> None:
    (buffer,), (lr, weight_decay, decay, fresh, ahead) = slots, numbers
    gradient = with_decay(gradient, parameter, weight_decay)
    np.add(decay * buffer, fresh * gradient, out=buffer)
    direction = gradient + ahead * buffer if ahead else buffer
    np.subtract(parameter, lr * direction, out=result)


SGD = Loop(LoopCode.SGD, _sgd)
MOMENTUM = Loop(LoopCode.MOMENTUM, _momentum)
