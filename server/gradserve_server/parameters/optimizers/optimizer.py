"""The interface of optimizers (validated settings, slots of state, the loop that steps elements), and their schedules.

An optimizer is data. For each round of a component it gives float64 numbers, such as a corrected rate, which the
stepper rounds to the dtype of the master; then its loop computes every element from the gradient, the master, the slots
and these numbers, by + - * / and sqrt alone. Each loop exists twice with the same sequence of roundings: compiled, in
`loops`, and as an equation for NumPy in `equations`.

A schedule gives the factor of the learning rate, by the number of rounds that have been applied.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum, IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError

Array: TypeAlias = NDArray[Any]

LARGEST = float(np.finfo(np.float32).max)
"""The largest setting: masters are float32, and a larger number would be infinite there."""


@dataclass(frozen=True)
class Slot:
    """An array of the state, of the shape and dtype of the master.

    Attributes:
        name: Its name as in PyTorch: "momentum_buffer", "exp_avg", "exp_avg_sq", "sum".
        initial_value: The value of all elements before the first round.
    """

    name: str
    initial_value: float = 0.0


class LoopCode(IntEnum):
    """The compiled loops of `loops`."""

    SGD = 0
    MOMENTUM = 1
    ADAM = 2
    ADAGRAD = 3
    ADAGRAD_OPTAX = 4
    YOGI = 5


NO_ADDEND, OWN_ADDEND, FLOAT16_ADDEND, BFLOAT16_ADDEND = range(4)
"""The dtypes of the last update of a component, for `loops`: there is none, that of the master, float16, bfloat16."""

Equation: TypeAlias = Callable[[Array, Array, Sequence[Array], Array, Sequence[Any]], None]
"""Steps elements with NumPy: takes the gradient, the master, the slots, the result and the numbers, all of the master's
dtype. Updates the slots in place, fills the result, and changes nothing else."""


@dataclass(frozen=True)
class Loop:
    """A loop over elements, which optimizers with the same equations share.

    Attributes:
        code: The compiled one.
        by_numpy: The same in NumPy.
    """

    code: LoopCode
    by_numpy: Equation


NUMBER = {"below": math.inf}
"""The metadata of settings that are finite numbers of at least 0."""
FRACTION = {"below": 1.0}
"""The metadata of settings that are numbers of at least 0 and less than 1."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer with its settings. Subclasses are frozen dataclasses.

    Raises:
        InvalidArgumentError: A setting is out of its range; its field is "optimizer." and the name of the setting.
    """

    def __post_init__(self) -> None:
        """Checks all settings: those without a declared range are flags."""
        for each in fields(self):
            value = getattr(self, each.name)
            if "below" in each.metadata:
                _check_number(value, each.metadata["below"], each.name)
            elif not isinstance(value, bool):
                raise setting_error(each.name, f"expected True or False, got {value!r}")

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The learning rate before the schedule's factor."""

    @property
    @abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """The slots of a component's state; none if it has no state but its count of rounds."""

    @property
    @abstractmethod
    def loop(self) -> Loop:
        """The loop that steps elements."""

    @abstractmethod
    def numbers(self, step: int, lr_factor: float) -> tuple[float, ...]:
        """Returns the numbers of a round for the loop.

        Args:
            step: The number of rounds in which the component had an update, this one included.
            lr_factor: The schedule's factor of the learning rate.
        """

    def keeps_state_of(self, other: "Optimizer") -> bool:
        """Returns True if slots and counts of rounds of another setting of this optimizer go on with this one.

        Otherwise slots begin with their initial values, and counts with the next round.
        """
        return type(self) is type(other) and self._slot_names() == other._slot_names()

    def _slot_names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)


def setting_error(name: str, message: str) -> InvalidArgumentError:
    """Returns the error for a setting."""
    return InvalidArgumentError(message, field=f"optimizer.{name}")


def _check_number(value: object, below: float, name: str) -> None:
    expected = f"a number of at least 0 and less than {below:g}" if math.isfinite(below) else "a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise setting_error(name, f"expected {expected} for {name}, got {value!r}")
    if math.isinf(below):
        expected = f"a number from 0 to {LARGEST:.3g}"
    if not 0 <= value < below or value > LARGEST:
        raise setting_error(name, f"expected {expected} for {name}, got {value!r}")


def power(base: float, exponent: int) -> float:
    """Returns a power by multiplications alone: the last bit of the C library's depends on the machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def with_decay(gradient: Array, parameter: Array, weight_decay: Any) -> Array:
    """Returns gradient + weight_decay parameter; the gradient itself without weight decay."""
    return gradient + weight_decay * parameter if weight_decay else gradient


_MAX_ROUNDS = (1 << 63) - 1


class ScheduleKind(Enum):
    """The course of the factor after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class Schedule:
    """A course of the learning rate, with the same factors on every machine.

    Attributes:
        kind: The course of the factor after warm-up. CONSTANT stays 1.
        warmup: The number of rounds over which the factor rises: (n + 1) / (warmup + 1) for n < warmup.
        rounds: The rounds after warm-up in which a LINEAR or COSINE factor goes from 1 to `end`, where it stays.
        end: The factor at the end.

    Raises:
        InvalidArgumentError: A value is out of its range; its field is "schedule." and the name of the attribute.
    """

    kind: ScheduleKind = ScheduleKind.CONSTANT
    warmup: int = 0
    rounds: int = 0
    end: float = 1.0

    def __post_init__(self) -> None:
        """Checks all values."""
        _check_count("warmup", self.warmup, 0)
        if self.kind is ScheduleKind.CONSTANT:
            if self.rounds or self.end != 1.0:
                raise InvalidArgumentError("expected no rounds and no end of a constant schedule", field="schedule")
            return
        _check_count("rounds", self.rounds, 1)
        end = self.end
        if isinstance(end, bool) or not isinstance(end, int | float) or not 0 <= end <= LARGEST:
            raise InvalidArgumentError(
                f"expected a number from 0 to {LARGEST:.3g} for end, got {end!r}", field="schedule.end"
            )

    def factor(self, num_applied: int) -> float:
        """Returns the factor of a round, by the number of rounds that have been applied before it."""
        if num_applied < self.warmup:
            return (num_applied + 1) / (self.warmup + 1)
        if self.kind is ScheduleKind.CONSTANT:
            return 1.0
        passed = num_applied - self.warmup
        if passed >= self.rounds:
            return self.end
        if self.kind is ScheduleKind.LINEAR:
            return 1.0 + (self.end - 1.0) * (passed / self.rounds)
        return self.end + (1.0 - self.end) * (1.0 + _cosine_of_part(passed, self.rounds)) / 2.0


def schedule_record(schedule: Schedule) -> dict[str, Any]:
    """Converts a schedule to values that JSON has; the reverse of `schedule_of`."""
    return {**asdict(schedule), "kind": schedule.kind.value}


def schedule_of(record: Mapping[str, Any]) -> Schedule:
    """Converts a record to a schedule.

    Raises:
        InvalidArgumentError, KeyError, TypeError, ValueError: It is no such record.
    """
    return Schedule(**{**record, "kind": ScheduleKind(record["kind"])})


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_ROUNDS:
        raise InvalidArgumentError(
            f"expected an integer from {least} to {_MAX_ROUNDS} for {name}, got {value!r}", field=f"schedule.{name}"
        )


def _cosine_of_part(passed: int, rounds: int) -> float:
    """Returns cos(pi passed / rounds), for 0 <= passed <= rounds.

    By series about the nearest multiple of pi / 2, with + - * / alone: the last bit of the C library's cosine depends
    on the machine. Errors are some 1e-16.
    """
    if 2 * passed > rounds:
        return -_cosine_of_part(rounds - passed, rounds)
    if 4 * passed > rounds:
        return _sine(math.pi * ((rounds - 2 * passed) / (2 * rounds)))
    return _cosine(math.pi * (passed / rounds))


_NUM_TERMS = 10
"""For angles up to pi / 4, the next term is less than 1e-19."""


def _cosine(angle: float) -> float:
    square, sum_ = angle * angle, 1.0
    for term in range(2 * _NUM_TERMS, 0, -2):
        sum_ = 1.0 - square / (term * (term - 1)) * sum_
    return sum_


def _sine(angle: float) -> float:
    square, sum_ = angle * angle, 1.0
    for term in range(2 * _NUM_TERMS, 0, -2):
        sum_ = 1.0 - square / (term * (term + 1)) * sum_
    return angle * sum_
