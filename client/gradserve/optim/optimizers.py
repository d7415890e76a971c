"""Optimizers with the names and defaults of PyTorch, two of Optax, and schedules of their learning rates."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from gradserve.conversion.plain import as_flag, as_integer, as_list, as_number
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


@dataclass(frozen=True, repr=False)
class Schedule:
    """A schedule, made by `constant`, `linear` or `cosine`. The server checks the ranges of its numbers.

    Attributes:
        kind: "constant", "linear" or "cosine".
        warmup: The rounds over which the factor rises to 1.
        rounds: The rounds after warm-up in which it goes from 1 to `end`; 0 for a constant one.
        end: The factor from then on.
    """

    kind: str
    warmup: int = 0
    rounds: int = 0
    end: float = 1.0

    def __repr__(self) -> str:
        """Returns a call that makes this schedule."""
        course = [] if self.kind == "constant" else [f"rounds={self.rounds}", f"end={self.end!r}"]
        warmup = [f"warmup={self.warmup}"] if self.warmup else []
        return f"{self.kind}({', '.join(course + warmup)})"


def constant(*, warmup: int = 0) -> Schedule:
    """Returns a schedule whose factor stays 1 after warm-up.

    Args:
        warmup: The rounds over which the factor rises: in the first it is 1 / (warmup + 1), then twice that, ...

    Raises:
        InvalidArgumentError: It is not an integer.
    """
    return Schedule("constant", _count("warmup", warmup))


def linear(rounds: int, end: float = 0.0, *, warmup: int = 0) -> Schedule:
    """Returns a schedule whose factor goes from 1 to `end` in a line, and stays.

    Args:
        rounds: The rounds that it takes, after warm-up.
        end: The factor at the end.
        warmup: The rounds over which the factor rises: in the first it is 1 / (warmup + 1), then twice that, ...

    Raises:
        InvalidArgumentError: An argument is not a number.
    """
    return _course("linear", rounds, end, warmup)


def cosine(rounds: int, end: float = 0.0, *, warmup: int = 0) -> Schedule:
    """Returns a schedule whose factor goes from 1 to `end` along half a cosine, and stays.

    Args:
        rounds: The rounds that it takes, after warm-up.
        end: The factor at the end.
        warmup: The rounds over which the factor rises: in the first it is 1 / (warmup + 1), then twice that, ...

    Raises:
        InvalidArgumentError: An argument is not a number.
    """
    return _course("cosine", rounds, end, warmup)


def _course(kind: str, rounds: int, end: float, warmup: int) -> Schedule:
    return Schedule(kind, _count("warmup", warmup), _count("rounds", rounds), as_number(end, Argument("end")))


def _count(name: str, value: int) -> int:
    return as_integer(value, Argument(name))
