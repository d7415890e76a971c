"""Passes on the steps of an operation, each in another form."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from gradserve.errors import GradserveError

StepT = TypeVar("StepT")
T = TypeVar("T")


def passed_on(
    steps: Generator[StepT, Any, T], form: Callable[[StepT], Generator[StepT, Any, Any]]
) -> Generator[StepT, Any, T]:
    """Returns a generator of steps with the same result as another one, and closes that one at the end.

    Args:
        steps: The other one. It gets the answers to its steps, and the errors of gradserve in place of answers.
        form: Takes one of its steps; yields what is to be done instead, and returns the answer.
    """
    try:
        step = next(steps)
        while True:
            try:
                answer = yield from form(step)
            except GradserveError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()
