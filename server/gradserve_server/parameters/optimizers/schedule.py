"""The factor of the learning rate, by the number of rounds that have been applied."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.optimizers.optimizer import LARGEST

_MAX_ROUNDS = (1 << 63) - 1


class ScheduleKind(Enum):
    """The course of the factor after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class Schedule:
    """A schedule, with the same factors on every machine.

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
