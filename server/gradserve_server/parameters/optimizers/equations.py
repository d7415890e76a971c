"""The optimizers with their equations: PyTorch's, Optax's, and those of Flower's strategies."""

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
    setting_error,
    with_decay,
)


@dataclass(frozen=True)
class Sgd(Optimizer):
    """PyTorch's SGD; `nesterov` needs a momentum and no dampening. Without momentum there is no buf.

    g += weight_decay p
    buf = g in the first round, momentum buf + (1 - dampening) g later
    g = g + momentum buf with nesterov, else buf
    p -= lr g
    """

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


MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))


@dataclass(frozen=True)
class Adam(Optimizer):
    """PyTorch's Adam, or with `decoupled` its AdamW.

    g += weight_decay p, or with AdamW p *= 1 - lr weight_decay
    m += (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g g
    p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    """

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


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """PyTorch's Adagrad.

    g += weight_decay p
    sum += g g
    p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)
    """

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
    """Optax's Adagrad.

    sum += g g
    p -= lr g / sqrt(sum + eps) where sum > 0
    """

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


@dataclass(frozen=True)
class Yogi(Optimizer):
    """Optax's Yogi; m and v begin with the initial accumulator value.

    m = beta1 m + (1 - beta1) g
    v -= (1 - beta2) sign(v - g g) g g
    p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    """

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


@dataclass(frozen=True)
class _Moments(Optimizer):
    """The settings and slots that Flower's FedAdam and FedYogi have in common.

    Here are the equations of flwr 1.42, which differ from those of the papers and of PyTorch. Flower adds a step along
    delta, the weighted mean of the clients' parameters minus its own; the gradient here is minus delta, so the first
    moment is minus Flower's m_t. Second moments begin with 0, where the paper has tau^2.
    """

    eta: float = field(metadata=NUMBER)
    beta1: float = field(metadata=FRACTION)
    beta2: float = field(metadata=FRACTION)
    tau: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.eta

    @property
    def slots(self) -> tuple[Slot, ...]:
        return MOMENTS


@dataclass(frozen=True)
class FlowerAdam(_Moments):
    """Flower's FedAdam. Rounds count from 1, so the correction of the first round is that of Adam's second.

    m = beta_1 m + (1 - beta_1) delta
    v = beta_2 v + (1 - beta_2) delta^2
    p += eta sqrt(1 - beta_2^(round + 1)) / (1 - beta_1^(round + 1)) m / (sqrt(v) + tau)
    """

    @property
    def loop(self) -> Loop:
        return ADAM

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        root = math.sqrt(1.0 - power(self.beta2, step + 1))
        rate = self.eta * lr_factor * root / (1.0 - power(self.beta1, step + 1))
        return adam_numbers(rate=rate, beta1=self.beta1, beta2=self.beta2, correction=1.0, eps=self.tau)


@dataclass(frozen=True)
class FlowerYogi(_Moments):
    """Flower's FedYogi, which has no correction.

    m = beta_1 m + (1 - beta_1) delta
    v -= (1 - beta_2) delta^2 sign(v - delta^2)
    p += eta m / (sqrt(v) + tau)
    """

    @property
    def loop(self) -> Loop:
        return YOGI

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        return yogi_numbers(self.eta * lr_factor, self.beta1, self.beta2, self.tau)


@dataclass(frozen=True)
class FlowerAdagrad(Optimizer):
    """Flower's FedAdagrad; see `_Moments` about delta.

    v += delta^2
    p += eta delta / (sqrt(v) + tau)
    """

    eta: float = field(metadata=NUMBER)
    tau: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.eta

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum"),)

    @property
    def loop(self) -> Loop:
        return ADAGRAD

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        return self.eta * lr_factor, 0.0, self.tau


@dataclass(frozen=True)
class FlowerAvgM(Optimizer):
    """Flower's FedAvgM: PyTorch's SGD with momentum.

    Momentum of the first round is the gradient itself. Without one, and with rate 1, Flower takes the mean itself.
    """

    server_learning_rate: float = field(metadata=NUMBER)
    server_momentum: float = field(metadata=NUMBER)

    @property
    def learning_rate(self) -> float:
        return self.server_learning_rate

    @property
    def slots(self) -> tuple[Slot, ...]:
        return momentum_slots(self.server_momentum)

    @property
    def loop(self) -> Loop:
        return MOMENTUM if self.server_momentum else SGD

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        lr = self.server_learning_rate * lr_factor
        return momentum_numbers(step, lr, self.server_momentum) if self.server_momentum else (lr, 0.0)
