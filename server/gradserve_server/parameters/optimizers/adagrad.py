"""PyTorch's Adagrad, and Optax's.

PyTorch:

    g += weight_decay p
    sum += g g
    p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)

Optax:

    sum += g g
    p -= lr g / sqrt(sum + eps) where sum > 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradserve_server.parameters.optimizers.optimizer import NUMBER, Array, Loop, LoopCode, Optimizer, Slot, with_decay


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """The settings of PyTorch's Adagrad."""

    lr: float = field(metadata=NUMBER)
    lr_decay: float = field(metadata=NUMBER)
    weight_decay: float = field(metadata=NUMBER)
    initial_accumulator_value: float = field(metadata=NUMBER)
    eps: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.lr

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", self.initial_accumulator_value),)

    @property
    def loop(self) -> Loop:
        return ADAGRAD

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        return self.lr * lr_factor / (1.0 + (step - 1) * self.lr_decay), self.weight_decay, self.eps


@dataclass(frozen=True)
class AdagradOptax(Optimizer):
    """The settings of Optax's Adagrad."""

    lr: float = field(metadata=NUMBER)
    initial_accumulator_value: float = field(metadata=NUMBER)
    eps: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.lr

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", self.initial_accumulator_value),)

    @property
    def loop(self) -> Loop:
        return ADAGRAD_OPTAX

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        return self.lr * lr_factor, self.eps


def _adagrad(gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]) -> None:
    (total,), (rate, weight_decay, eps) = slots, numbers
    gradient = with_decay(gradient, parameter, weight_decay)
    np.add(total, gradient * gradient, out=total)
    np.subtract(parameter, rate * gradient / (np.sqrt(total) + eps), out=result)


def _adagrad_optax(
    gradient: Array, parameter: Array, slots: Sequence[Array], result: Array, numbers: Sequence[Any]
) -> None:
    (total,), (lr, eps) = slots, numbers
    np.add(total, gradient * gradient, out=total)
    scale = np.where(total > 0, 1 / np.sqrt(total + eps), np.zeros_like(total))
    np.subtract(parameter, lr * (scale * gradient), out=result)


ADAGRAD = Loop(LoopCode.ADAGRAD, _adagrad)
ADAGRAD_OPTAX = Loop(LoopCode.ADAGRAD_OPTAX, _adagrad_optax)
