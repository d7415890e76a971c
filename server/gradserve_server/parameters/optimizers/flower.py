"""Flower's FedAdam, FedYogi, FedAdagrad and FedAvgM, as its strategies compute them (flwr 1.42).

Flower adds a step along delta, the weighted mean of the clients' parameters minus its own; the gradient here is minus
delta, so the first moment here is minus Flower's m_t. Its equations differ from those of the papers and of PyTorch:

* FedAdam: m = beta_1 m + (1 - beta_1) delta, v = beta_2 v + (1 - beta_2) delta^2,
  p += eta sqrt(1 - beta_2^(round + 1)) / (1 - beta_1^(round + 1)) m / (sqrt(v) + tau). Rounds count from 1, so the
  correction of the first round is that of Adam's second; tau stands beside the root of the uncorrected v.
* FedYogi: v -= (1 - beta_2) delta^2 sign(v - delta^2); no correction at all: p += eta m / (sqrt(v) + tau).
* FedAdagrad: v += delta^2, p += eta delta / (sqrt(v) + tau).
* FedAvgM: PyTorch's SGD with momentum. Without one, and with rate 1, Flower takes the mean itself.

In the first three v begins with 0, where the paper has tau^2. Momentum of the first round is the gradient itself.
"""

import math
from dataclasses import dataclass, field

from gradserve_server.parameters.optimizers.adagrad import ADAGRAD
from gradserve_server.parameters.optimizers.adam import ADAM, MOMENTS, adam_numbers
from gradserve_server.parameters.optimizers.optimizer import FRACTION, NUMBER, Loop, Optimizer, Slot, power
from gradserve_server.parameters.optimizers.sgd import MOMENTUM, SGD, momentum_numbers, momentum_slots
from gradserve_server.parameters.optimizers.yogi import YOGI, yogi_numbers


@dataclass(frozen=True)
class _Moments(Optimizer):
    """The settings and slots that FedAdam and FedYogi have in common."""

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
    """The settings of FedAdam."""

    @property
    def loop(self) -> Loop:
        return ADAM

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        root = math.sqrt(1.0 - power(self.beta2, step + 1))
        rate = self.eta * lr_factor * root / (1.0 - power(self.beta1, step + 1))
        return adam_numbers(rate=rate, beta1=self.beta1, beta2=self.beta2, correction=1.0, eps=self.tau)


@dataclass(frozen=True)
class FlowerYogi(_Moments):
    """The settings of FedYogi."""

    @property
    def loop(self) -> Loop:
        return YOGI

    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        return yogi_numbers(self.eta * lr_factor, self.beta1, self.beta2, self.tau)


@dataclass(frozen=True)
class FlowerAdagrad(Optimizer):
    """The settings of FedAdagrad."""

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
    """The settings of FedAvgM."""

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
