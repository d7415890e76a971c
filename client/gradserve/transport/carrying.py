"""Drives generators of steps: sends each step's answer, or its error, back to the generator."""

import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from gradserve.calls.exchange import Operation
from gradserve.calls.retries import Attempts, Contact, with_retries
from gradserve.errors import GradserveError
from gradserve.tracing.client import traced
from gradserve.transport.settings import ConnectionSettings

StepT = TypeVar("StepT")
T = TypeVar("T")


def attempts(operation: Operation[T], settings: ConnectionSettings, contact: Contact) -> Attempts[T]:
    """Returns the steps of an operation with these settings, by this machine's clock."""
    return with_retries(operation, settings.times, settings.retries, time.monotonic, contact)


def traced_attempts(operation: Operation[T], settings: ConnectionSettings, contact: Contact) -> Attempts[T]:
    """Returns the same steps for an operation of the user: its calls have spans, if the settings have a tracer."""
    steps = attempts(operation, settings, contact)
    return steps if settings.tracer is None else traced(steps, settings.tracer)


def carry_out(steps: Generator[StepT, Any, T], perform: Callable[[StepT], Any]) -> T:
    """Returns the result of a generator of steps, or raises its error.

    Args:
        steps: The generator. It is closed at the end in any case.
        perform: Returns the answer to a step, or raises its error. The generator handles a GradserveError.
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
    """Returns the result of a generator of steps like `carry_out`; awaits the answer to each step."""
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
