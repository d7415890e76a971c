"""Optimizers with the names and defaults of PyTorch, and two of Optax."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from gradserve.conversion.plain import as_flag, as_list, as_number
from gradserve_protocol.argument import Argument


@dataclass(frozen=True, repr=False)
class Optimizer:
    """An optimizer of parameters: one of the classes of `gradserve.optim` and `gradserve.optim.flower`.

    The server checks the ranges of its settings.

    Raises:
        InvalidArgumentError: A setting is not a number, or not True or False.
    """

    def __post_init__(self) -> None:
        """Converts all settings."""
        for each in fields(self):
            converted = _CONVERSIONS[each.type](getattr(self, each.name), Argument(each.name))
            object.__setattr__(self, each.name, converted)

    def __repr__(self) -> str:
        """Returns a call that makes this optimizer; settings with their defaults are left out, but for the first."""
        first, *rest = fields(self)
        shown = [first, *(each for each in rest if getattr(self, each.name) != _default(each))]
        return f"{type(self).__name__}({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in shown)})"


def _as_betas(value: Any, argument: Argument) -> tuple[float, float]:
    numbers = as_list(value, "two numbers", argument)
    if len(numbers) != 2:
        raise argument.error("two numbers", value)
    beta1, beta2 = (as_number(each, argument) for each in numbers)
    return beta1, beta2


_CONVERSIONS: Mapping[Any, Callable[[Any, Argument], Any]] = {
    float: as_number,
    bool: as_flag,
    tuple[float, float]: _as_betas,
}


def _default(each: "Field[Any]") -> Any:
    return each.default if each.default is not MISSING else None


@dataclass(frozen=True, repr=False)
class SGD(Optimizer):
    """PyTorch's SGD.

    Attributes:
        lr: The learning rate.
        momentum: The factor of the momentum buffer in each round.
        dampening: Gradients count 1 - dampening in the momentum buffer, after the first.
        weight_decay: The factor of the parameters in the gradient.
        nesterov: Whether to use Nesterov momentum. Needs a momentum and no dampening.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, repr=False)
class Adam(Optimizer):
    """PyTorch's Adam.

    Attributes:
        lr: The learning rate.
        betas: The decay rates of the moving averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: The factor of the parameters in the gradient.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class AdamW(Optimizer):
    """PyTorch's AdamW: Adam with decoupled weight decay.

    Attributes:
        lr: The learning rate.
        betas: The decay rates of the moving averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: In each round, the parameters are multiplied by 1 - lr weight_decay.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass(frozen=True, repr=False)
class Adagrad(Optimizer):
    """PyTorch's Adagrad.

    Attributes:
        lr: The learning rate.
        lr_decay: In round t, from 1 on, the rate is lr / (1 + (t - 1) lr_decay).
        weight_decay: The factor of the parameters in the gradient.
        initial_accumulator_value: The sum of squares before the first round.
        eps: Added to the denominator.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True, repr=False)
class Yogi(Optimizer):
    """Optax's Yogi.

    Attributes:
        lr: The learning rate.
        betas: The decay rates of the moving averages of the gradient and of its square.
        eps: Added to the denominator.
        initial_accumulator_value: Both averages before the first round.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-3
    initial_accumulator_value: float = 1e-6


@dataclass(frozen=True, repr=False)
class AdagradOptax(Optimizer):
    """Optax's Adagrad, where `eps` is inside of the root, and parameters with a sum of 0 do not move.

    Attributes:
        lr: The learning rate.
        initial_accumulator_value: The sum of squares before the first round.
        eps: Added to the sum of squares.
    """

    lr: float
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7


def adagrad_optax(lr: float, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> AdagradOptax:
    """Returns Optax's Adagrad, with the arguments of `optax.adagrad`.

    Args:
        lr: The learning rate.
        initial_accumulator_value: The sum of squares before the first round.
        eps: Added to the sum of squares.

    Raises:
        InvalidArgumentError: A setting is not a number.
    """
    return AdagradOptax(lr, initial_accumulator_value, eps)
