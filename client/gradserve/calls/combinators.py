"""Operations made of other operations: several at the same time, on one of several servers, or with progress."""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeVar

from gradserve.calls.exchange import (
    Allocate,
    Background,
    BeginCleanUp,
    CleanUp,
    Exchange,
    Operation,
    Pause,
    Reply,
    Together,
    Track,
    Unary,
    Whole,
    Work,
)
from gradserve_protocol.errors import CallCancelledError, GradserveError

StepT = TypeVar("StepT")
T = TypeVar("T")


def map_steps(
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


def together(*operations: Operation[T]) -> Operation[list[T]]:
    """Runs operations at the same time; returns their results, in the order of the operations.

    The first error ends the others: the step they wait for, and any step they ask for after that, fails with
    CallCancelledError, as in a closed client. When all have ended, the first error is raised. The server may have
    carried out a cancelled call; calls that must count once have an id, and can be sent again.
    """
    results: list[T] = yield Together(operations)
    return results


def all_ended(*operations: Operation[T]) -> Operation[list[T]]:
    """Runs operations at the same time, each to its end; returns their results, in the order of the operations.

    When all have ended, the first error in this order is raised.
    """
    outcomes = yield from together(*map(_outcome, operations))
    error = next((error for _, error in outcomes if error is not None), None)
    if error is None:
        return [result for result, _ in outcomes]
    try:
        raise error
    finally:
        del error, outcomes  # its traceback has this frame: a cycle would keep the arguments until it is collected


def with_beside(operation: Operation[T], beside: Operation[None]) -> Operation[T]:
    """Runs an operation, and another one that is cancelled when it ends; returns the result of the first one.

    An error of the other one does not end the first one.
    """
    outcome: list[tuple[Any, GradserveError | None]] = []

    def ended() -> Operation[None]:
        outcome.append((yield from _outcome(operation)))
        raise CallCancelledError("cancelled: the operation beside which it ran has ended")

    try:
        yield from together(ended(), _without_result(beside))
    except CallCancelledError:
        if not outcome:
            raise
    ((result, error),) = outcome
    if error is None:
        return result  # type: ignore[no-any-return]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # not the error that ended the other one, whose traceback knows this one
        outcome.clear()
        del error  # as in `all_ended`


def at_target(target: int, operation: Operation[T]) -> Operation[T]:
    """Sends all exchanges of an operation to one of several servers, by its index among those of the transport."""

    def aimed(exchange: Exchange) -> Operation[Any]:
        if isinstance(exchange, CleanUp):
            begin: BeginCleanUp = yield exchange
            return lambda clean_up: begin(lambda: at_target(target, clean_up()))
        return (yield _aimed(target, exchange))

    return map_steps(operation, aimed)


def _outcome(operation: Operation[T]) -> Operation[tuple[Any, GradserveError | None]]:
    try:
        return (yield from operation), None
    except GradserveError as error:
        return None, error


def _without_result(operation: Operation[None]) -> Operation[None]:
    yield from _outcome(operation)


def _aimed(target: int, exchange: Exchange) -> Exchange:
    match exchange:
        case Pause() | Allocate() | Track() | CleanUp() | Work():
            return exchange
        case Background(begin):
            return Background(lambda: at_target(target, begin()))
        case Together(operations):
            return Together(tuple(at_target(target, each) for each in operations))
        case Unary():
            return aimed_call(target, exchange)
        case Whole(call):
            return exchange._replace(call=aimed_call(target, call))
    aimed: Any = replace(exchange, target=target)
    return aimed  # type: ignore[no-any-return]


def replied(call: Whole) -> Operation[Reply]:
    """Returns an operation that is a single call, for what takes operations."""
    reply: Reply = yield call
    return reply


def aimed_call(target: int, call: Unary) -> Unary:
    """Returns a call to one of several servers, with its renewal."""
    renewal = call.renewal
    if renewal is None:
        return call._replace(target=target)
    return call._replace(target=target, renewal=lambda: at_target(target, renewal()))
