"""Carries generators out: what each step is answered by, or its error, goes back to where it was yielded."""

import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from gradserve.calls.exchange import Operation
from gradserve.calls.retries import Attempts, with_retries
from gradserve.errors import GradserveError
from gradserve.transport.settings import ConnectionSettings

StepT = TypeVar("StepT")
T = TypeVar("T")


def attempts(operation: Operation[T], settings: ConnectionSettings) -> Attempts[T]:
    """Returns the steps of an operation on a connection with these settings, in the time of this machine."""
    return with_retries(operation, settings.times, settings.retries, time.monotonic)


def carry_out(steps: Generator[StepT, Any, T], perform: Callable[[StepT], Any]) -> T:
    """Returns the result of a generator of steps, or raises its error.

    Args:
        steps: The generator. It is closed at the end, however that comes.
        perform: Returns the answer to a step, or raises its error: a GradserveError is the generator's to handle.
    """
    try:
        step = next(steps)
        while True:
            try:
                answer = perform(step)
            except GradserveError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()  # at once also where it was interrupted


async def carry_out_async(steps: Generator[StepT, Any, T], perform: Callable[[StepT], Awaitable[Any]]) -> T:
    """Returns the result of a generator of steps as `carry_out` does; awaits what each step is answered by."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await perform(step)
            except GradserveError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()  # at once also where it was cancelled
