"""Drives operations: sends the answer or the error of each step back to its generator, for one operation or several.

Without I/O, for both transports, which perform the steps.
"""

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from gradserve.calls.exchange import Background, Local, Operation, Pause, Together
from gradserve.calls.retries import Attempt, Attempts, Contact, with_retries
from gradserve.errors import CallCancelledError, GradserveError
from gradserve.interceptors import intercepted
from gradserve.transport.settings import ConnectionSettings

StepT = TypeVar("StepT")
T = TypeVar("T")


class BlockingTransport(Protocol):
    """Carries out operations in the calling thread. Safe to use from several threads."""

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    def close(self) -> None:
        """Ends operations under way in other threads with CallCancelledError, and disconnects."""
        ...


class AsyncTransport(Protocol):
    """Carries out operations on the event loop in which it was made."""

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    async def close(self) -> None:
        """Ends operations under way with CallCancelledError, and disconnects."""
        ...


async def drive(steps: Generator[StepT, Any, T], perform: Callable[[StepT], Awaitable[Any]]) -> T:
    """Returns the result of a generator of steps, or raises its error.

    Args:
        steps: The generator. It is closed at the end in any case.
        perform: Returns the answer to a step, or raises its error. The generator handles a GradserveError.
    """
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
        steps.close()  # at once also where it was interrupted or cancelled


def completed(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that waits for no event loop: whatever it awaits blocks this thread."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine of the blocking client has waited for an event loop")


def attempts(
    operation: Operation[T], settings: ConnectionSettings, contact: Contact, *, in_background: bool = False
) -> Attempts[T]:
    """Returns the steps of an operation with these settings, by this machine's clock."""
    times, policy, around = settings.times, settings.retries, settings.interceptors
    if not (around.calls or around.attempts):
        return with_retries(operation, times, policy, time.monotonic, contact)
    again = partial(with_retries, times=times, policy=policy, clock=time.monotonic, contact=contact)
    return intercepted(operation, around, times, again, in_background=in_background)


class Member:
    """One of the operations that run together.

    Attributes:
        steps: The operation, with its retries.
        group: The operations that it runs together with.
        place: Its index among them.
        inner: The group of operations that it is waiting for, if any.
        waits: Whether a step of it is under way.
        has_ended: Whether it has a result or an error.
    """

    def __init__(self, steps: Attempts[Any], group: "Group", place: int) -> None:
        self.steps = steps
        self.group = group
        self.place = place
        self.inner: Group | None = None
        self.waits = False
        self.has_ended = False


class Group:
    """Operations that all end with the first error of one.

    Attributes:
        outer: The operation that waits for them; None if it is the schedule's caller.
        members: The operations.
        results: The results of those that have ended, by index.
        error: The first error.
        num_left: The number of operations that have not ended.
    """

    def __init__(self, outer: Member | None, operations: Sequence[Attempts[Any]]) -> None:
        self.outer = outer
        self.members = [Member(steps, self, place) for place, steps in enumerate(operations)]
        self.results: list[Any] = [None] * len(self.members)
        self.error: BaseException | None = None
        self.num_left = len(self.members)

    @property
    def is_over(self) -> bool:
        """True if its members must not begin anything more."""
        return self.error is not None or (self.outer is not None and self.outer.group.is_over)


class Steps(Protocol):
    """Carries out steps, and reports later how each has ended: by `Schedule.answer` or `Schedule.fail`."""

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        ...

    def cancel(self, member: Member, /) -> None:
        """Cancels a member's step, which must not be reported any more; it may have failed to begin."""
        ...


class Schedule:
    """Advances operations that run together whenever a step of one has ended, in the thread or task that reports it."""

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        attempts: Callable[[Operation[Any]], Attempts[Any]],
        steps: Steps,
    ) -> None:
        """Begins them.

        Args:
            operations: The operations.
            attempts: Returns an operation with its retries.
            steps: Carries out the steps.
        """
        self._attempts = attempts
        self._steps = steps
        self._root = self._group(None, operations)
        try:
            self._begin_members(self._root)
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """True if all operations have ended."""
        return not self._root.num_left

    def results(self) -> list[Any]:
        """Returns the results after all operations have ended, or raises the first error."""
        error, self._root.error = self._root.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the arguments until it is collected
        return self._root.results

    def answer(self, member: Member, answer: Any) -> None:
        """Resumes an operation with the answer to its step."""
        member.waits = False
        self._advance(member, partial(member.steps.send, answer))

    def fail(self, member: Member, error: BaseException) -> None:
        """Resumes an operation with the error of its step; anything but a GradserveError ends it."""
        member.waits = False
        if isinstance(error, GradserveError):
            self._advance(member, partial(member.steps.throw, error))
        else:
            member.steps.close()
            self._end(member, None, error)

    def close(self) -> None:
        """Cancels whatever has not ended, as for an interrupted operation. Can be called again."""
        self._close(self._root)

    def _group(self, outer: Member | None, operations: Sequence[Operation[Any]]) -> Group:
        return Group(outer, [self._attempts(operation) for operation in operations])

    def _begin_members(self, group: Group) -> None:
        for member in group.members:
            self._advance(member, partial(next, member.steps))

    def _advance(self, member: Member, resume: Callable[[], Any]) -> None:
        try:
            step = resume()
        except StopIteration as stop:
            self._end(member, stop.value, None)
        except BaseException as error:
            self._end(member, None, error)
        else:
            self._begin(member, step)

    def _begin(self, member: Member, step: Attempt | Pause | Background | Local | Together) -> None:
        if member.group.is_over:
            self.fail(member, _given_up())
        elif not isinstance(step, Together):
            member.waits = True
            self._steps.begin(member, step)
        elif not step.operations:
            self.answer(member, [])
        else:
            member.inner = self._group(member, step.operations)
            self._begin_members(member.inner)

    def _end(self, member: Member, result: Any, error: BaseException | None) -> None:
        group = member.group
        member.has_ended = True
        group.results[member.place] = result
        if error is not None and group.error is None:
            group.error = error
            for other in group.members:
                self._give_up(other)
        group.num_left -= 1
        if not group.num_left:
            group.members = []  # they know it: a cycle would keep their arrays until it is collected
        if not group.num_left and group.outer is not None:
            group.outer.inner = None
            if group.error is None:
                self.answer(group.outer, group.results)
            else:
                self.fail(group.outer, group.error)

    def _give_up(self, member: Member) -> None:
        if member.inner is not None:
            for each in member.inner.members:
                self._give_up(each)
        elif member.waits:
            self._steps.cancel(member)
            self.fail(member, _given_up())

    def _close(self, group: Group) -> None:
        for member in group.members:
            if member.has_ended:
                continue
            if member.inner is not None:
                self._close(member.inner)
            if member.waits:
                member.waits = False
                self._steps.cancel(member)
            member.has_ended = True
            member.steps.close()
        group.members = []


def _given_up() -> GradserveError:
    return CallCancelledError("cancelled: another of the operations that ran together has failed")
