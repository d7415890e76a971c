"""Operations that run together, without I/O: which steps are begun, given up and answered."""

import math
from typing import Any

import pytest

from gradserve.calls.combinators import at_target, together
from gradserve.calls.exchange import Background, Operation, Pause, TimeLimits, Unary
from gradserve.calls.retries import Attempt, Attempts, Contact, RetryPolicy, Step, with_retries
from gradserve.errors import CallCancelledError, GradserveError, NotFoundError, UnavailableError
from gradserve.transport.driving import Member, Schedule
from gradserve_protocol.v1 import server_messages_pb2


def unary(name: str) -> Unary:
    return Unary("Service", name, server_messages_pb2.GetServerInfoRequest())


def name_of(step: Step) -> str:
    if isinstance(step, Attempt) and isinstance(step.exchange, Unary):
        return step.exchange.method
    return type(step).__name__


class Steps:
    """Steps that end when a test says so.

    Attributes:
        under_way: Those that have begun and not ended, by name.
        cancelled: The names of those that were broken off.
    """

    def __init__(self) -> None:
        self.under_way: dict[str, Member] = {}
        self.cancelled: list[str] = []

    def begin(self, member: Member, step: Any, /) -> None:
        self.under_way[name_of(step)] = member

    def cancel(self, member: Member, /) -> None:
        (name,) = (name for name, each in self.under_way.items() if each is member)
        del self.under_way[name]
        self.cancelled.append(name)


class Run:
    """A schedule of operations, and the steps of it."""

    def __init__(self, *operations: Operation[Any]) -> None:
        self.steps = Steps()
        self.schedule = Schedule(operations, _attempts, self.steps)

    def answer(self, name: str, answer: Any = None) -> None:
        self.schedule.answer(self.steps.under_way.pop(name), answer)

    def fail(self, name: str, error: BaseException) -> None:
        self.schedule.fail(self.steps.under_way.pop(name), error)

    def __contains__(self, name: str) -> bool:
        return name in self.steps.under_way


def _attempts(operation: Operation[Any]) -> Attempts[Any]:
    return with_retries(operation, TimeLimits(math.inf), RetryPolicy(pauses=(1.0,)), lambda: 0.0, Contact())


class Log:
    """What operations were answered and how they ended."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def operation(self, *names: str) -> Operation[str]:
        """Asks one after the other, and returns the last answer."""
        answer = ""
        try:
            for name in names:
                answer = yield unary(name)
        except GradserveError as error:
            self.lines.append(f"{names[0]}: {type(error).__name__}")
            raise
        except GeneratorExit:
            self.lines.append(f"{names[0]}: closed")
            raise
        return answer

    def stubborn(self, name: str, later: str) -> Operation[str]:
        """Asks for something else after an error."""
        try:
            yield unary(name)
        except GradserveError:
            yield from self.operation(later)
        return name


@pytest.fixture
def log() -> Log:
    return Log()


def test_all_begin_at_once_and_end_in_any_order(log: Log) -> None:
    run = Run(log.operation("a"), log.operation("b"), log.operation("c"))
    assert set(run.steps.under_way) == {"a", "b", "c"}
    for name in ("c", "a", "b"):
        assert not run.schedule.is_over
        run.answer(name, name.upper())
    assert run.schedule.is_over
    assert run.schedule.results() == ["A", "B", "C"]


def test_each_goes_on_by_itself(log: Log) -> None:
    run = Run(log.operation("a", "b", "c"), log.operation("x"))
    run.answer("a")
    run.answer("b")
    assert set(run.steps.under_way) == {"c", "x"}


def test_nothing_is_over_at_once() -> None:
    run = Run()
    assert run.schedule.is_over
    assert run.schedule.results() == []


def test_the_first_error_ends_the_others(log: Log) -> None:
    run = Run(log.operation("a"), log.operation("b"), log.operation("c"))
    run.answer("a", "A")
    run.fail("c", NotFoundError("gone"))
    assert run.steps.cancelled == ["b"]
    assert log.lines == ["c: NotFoundError", "b: CallCancelledError"]
    assert run.schedule.is_over
    with pytest.raises(NotFoundError, match=r"^gone \[GS_\w+\]$"):
        run.schedule.results()


def test_after_it_nothing_new_is_begun(log: Log) -> None:
    run = Run(log.stubborn("a", "later"), log.operation("b"))
    run.fail("b", NotFoundError("gone"))
    assert run.schedule.is_over
    assert log.lines == ["b: NotFoundError", "later: CallCancelledError"]
    assert run.steps.under_way == {}


def test_an_error_before_the_first_exchange(log: Log) -> None:
    def refused() -> Operation[str]:
        yield from ()
        raise NotFoundError("at once")

    run = Run(log.operation("a"), refused(), log.operation("b"))
    assert run.steps.cancelled == ["a"]
    assert log.lines == ["a: CallCancelledError", "b: CallCancelledError"]
    with pytest.raises(NotFoundError, match="at once"):
        run.schedule.results()


def test_each_is_tried_again_by_itself(log: Log) -> None:
    run = Run(log.operation("a"), log.operation("b"))
    run.fail("a", UnavailableError("no"))
    assert set(run.steps.under_way) == {"Pause", "b"}
    run.answer("Pause")
    run.answer("a", 1)
    run.answer("b", 2)
    assert run.schedule.results() == [1, 2]


def test_an_operation_that_waits_for_others_goes_on_with_their_results(log: Log) -> None:
    def outer() -> Operation[list[str]]:
        found = yield from together(log.operation("a"), log.operation("b"))
        found.append((yield unary("c")))
        return found

    run = Run(outer(), log.operation("x"))
    assert set(run.steps.under_way) == {"a", "b", "x"}
    run.answer("b", "B")
    run.answer("a", "A")
    assert set(run.steps.under_way) == {"c", "x"}
    run.answer("x", "X")
    run.answer("c", "C")
    assert run.schedule.results() == [["A", "B", "C"], "X"]


def test_together_with_nothing() -> None:
    def outer() -> Operation[list[str]]:
        return (yield from together())

    assert Run(outer()).schedule.results() == [[]]


def test_an_operation_can_go_on_after_the_error_of_others(log: Log) -> None:
    def outer() -> Operation[str]:
        try:
            yield from together(log.operation("a"), log.operation("b"))
        except NotFoundError:
            return (yield from log.operation("instead"))
        return "not reached"

    run = Run(outer(), log.operation("x"))
    run.fail("a", NotFoundError("gone"))
    assert run.steps.cancelled == ["b"]
    run.answer("instead", "answer")
    run.answer("x", "X")
    assert run.schedule.results() == ["answer", "X"]


def test_an_error_outside_ends_those_inside(log: Log) -> None:
    def outer() -> Operation[Any]:
        return (yield from together(log.operation("a"), log.operation("b")))

    run = Run(outer(), log.operation("x"))
    run.fail("x", NotFoundError("gone"))
    assert sorted(run.steps.cancelled) == ["a", "b"]
    assert log.lines == ["x: NotFoundError", "a: CallCancelledError", "b: CallCancelledError"]
    with pytest.raises(NotFoundError):
        run.schedule.results()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
def test_other_exceptions_end_all(log: Log, error: BaseException) -> None:
    def outer() -> Operation[Any]:
        try:
            yield from together(log.operation("a"), log.operation("b"))
        except GradserveError:
            log.lines.append("handled")

    run = Run(outer(), log.operation("x"))
    run.fail("a", error)
    assert sorted(run.steps.cancelled) == ["b", "x"]
    assert "a: closed" in log.lines
    assert "handled" not in log.lines
    with pytest.raises(type(error)):
        run.schedule.results()


def test_a_step_that_cannot_begin_ends_all(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Steps.begin

    def begin_all_but_b(self: Steps, member: Member, step: Any, /) -> None:
        begin(self, member, step)
        if name_of(step) == "b":
            raise RuntimeError("can't start new thread")

    steps = Steps()
    monkeypatch.setattr(Steps, "begin", begin_all_but_b)
    with pytest.raises(RuntimeError, match="new thread"):
        Schedule([log.operation("a"), log.operation("b"), log.operation("c")], _attempts, steps)
    assert steps.cancelled == ["a", "b"]
    assert log.lines == ["a: closed", "b: closed"]


def test_closing_closes_all_and_breaks_all_off(log: Log) -> None:
    def outer() -> Operation[Any]:
        yield from together(log.operation("a"), log.operation("b"))

    run = Run(outer(), log.operation("x"), log.operation("done"))
    run.answer("done")
    run.schedule.close()
    run.schedule.close()
    assert sorted(run.steps.cancelled) == ["a", "b", "x"]
    assert sorted(log.lines) == ["a: closed", "b: closed", "x: closed"]


def targets_of(operation: Operation[Any]) -> list[int]:
    """Returns where the exchanges of an operation go to, with those that it runs together or in the background."""
    found: list[int] = []
    for exchange in operation:
        if isinstance(exchange, Background):
            found += targets_of(exchange.begin())
        elif not isinstance(exchange, Pause):
            found += [exchange.target] if isinstance(exchange, Unary) else _of_all(exchange)
    return found


def _of_all(exchange: Any) -> list[int]:
    return [target for each in exchange.operations for target in targets_of(each)]


def test_all_exchanges_of_an_operation_go_to_its_target(log: Log) -> None:
    def several() -> Operation[None]:
        yield unary("a")
        yield Pause(1)
        yield from together(log.operation("b"), at_target(7, log.operation("c")))
        yield Background(background)

    def background() -> Operation[None]:
        yield unary("d")

    assert targets_of(several()) == [0, 0, 7, 0]
    assert targets_of(at_target(3, several())) == [3, 3, 3, 3]


def test_an_operation_at_a_target_has_its_answers_errors_and_end(log: Log) -> None:
    operation = at_target(1, log.stubborn("a", "b"))
    next(operation)
    operation.throw(NotFoundError("gone"))
    operation.close()
    assert log.lines == ["b: closed"]
    operation = at_target(1, log.operation("a"))
    next(operation)
    with pytest.raises(StopIteration) as stop:
        operation.send("answer")
    assert stop.value.value == "answer"
    with pytest.raises(CallCancelledError):
        Run(at_target(1, _refusing())).schedule.results()


def _refusing() -> Operation[None]:
    yield from ()
    raise CallCancelledError("refused")
