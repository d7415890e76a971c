"""Schedules: the factor of the learning rate, by the number of rounds that have been applied."""

from dataclasses import dataclass

from gradserve.conversion.plain import as_integer, as_number
from gradserve_protocol.argument import Argument


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
