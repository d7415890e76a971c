"""How a worker lets others in, without a server."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.training.joining import Attendant
from gradserve.training.state import Carried, State
from tests.servers.polling import PATIENCE_SECONDS


class Requests:
    """Requests of one worker, which wait until they are answered."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()
        self.answer_given: tuple[float, int] | None = None
        self.refusals: list[str] = []

    def requesters(self) -> Collection[str]:
        self.asked.set()
        return () if self.answered.is_set() else ("new",)

    def answer(self, carried: Carried, step: int) -> None:
        self.answer_given = float(carried.components["float64"][0]), step
        self.answered.set()

    def refuse(self, problem: str) -> None:
        self.refusals.append(problem)
        self.answered.set()


class Training:
    """Weights that change between rests."""

    def __init__(self) -> None:
        self.weight = np.zeros(())
        self.requests = Requests()
        self.attendant = Attendant(self.requests, "me", self.state, check_seconds=0.001)  # type: ignore[arg-type]

    def state(self) -> State:
        return State({"w": self.weight})


def steps() -> Iterator[int]:
    """Counts steps, for as long as a test has patience."""
    end = time.monotonic() + PATIENCE_SECONDS
    for step in itertools.count(1):
        assert time.monotonic() < end
        yield step


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.attendant.close()


def test_a_rest_however_short_is_enough(training: Training) -> None:
    """The end of a rest waits until the state is copied, if somebody has asked for it."""
    assert training.requests.asked.wait(PATIENCE_SECONDS), "nobody looks for requests while the worker computes"
    for step in steps():
        if training.requests.answered.is_set():
            break
        training.weight = np.array(float(step))
        with training.attendant.at_rest(step, ["me", "other"]):
            pass
        training.weight = np.array(-1.0)  # between steps
        training.requests.answered.wait(0.001)
    assert training.requests.answer_given is not None
    weight, at = training.requests.answer_given
    assert weight == at > 0


def test_a_rest_that_is_interrupted_is_over(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the end of a rest waits for a copy: what changes from then on is no state of that step."""
    wait_for = training.attendant._changed.wait_for

    def interrupted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait_for(predicate, timeout)

    training.weight = np.array(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(training.attendant._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), training.attendant.at_rest(1, ["me", "other"]):
            pass
        training.weight = np.array(-1.0)
    for _ in range(2):
        training.requests.asked.clear()
        assert training.requests.asked.wait(PATIENCE_SECONDS)
    assert training.requests.answer_given in (None, (1.0, 1))


PROBLEMS: dict[str, tuple[Any, str]] = {
    "a description that fails": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "a state that cannot travel": (lambda: State({}, {"made_by": print}), r"metadata['made_by'] is <built-in"),
}


@pytest.mark.parametrize(("state", "message"), list(PROBLEMS.values()), ids=list(PROBLEMS))
def test_problems_of_the_state_are_told_to_the_newcomer_alone(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, state: Any, message: str
) -> None:
    monkeypatch.setattr(training.attendant, "_state", state)
    for step in steps():
        with training.attendant.at_rest(step, ["me"]):
            training.requests.answered.wait(0.001)
        if len(training.requests.refusals) == 3:
            break
        if training.requests.answered.is_set():
            training.requests.answered.clear()  # another one comes
    assert all(message in each for each in training.requests.refusals)
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert message in record.getMessage()


@pytest.mark.parametrize(
    "error", [gradserve.ResourceExhaustedError("full"), gradserve.InvalidArgumentError("too long")]
)
def test_a_state_that_the_server_refuses(
    training: Training, monkeypatch: pytest.MonkeyPatch, error: gradserve.GradserveError
) -> None:
    def answer(carried: Carried, step: int) -> None:
        raise error

    monkeypatch.setattr(training.requests, "answer", answer)
    for step in steps():
        with training.attendant.at_rest(step, ["me"]):
            if training.requests.answered.wait(0.001):
                break
    assert training.requests.refusals == [error.message]


def test_errors_of_the_server_are_logged_once(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter(["gone", "gone", "back", "", "gone", ""])
    seen_all = threading.Event()

    def requesters() -> Collection[str]:
        answer = next(answers, None)
        if answer:
            raise gradserve.UnavailableError(f"the server is {answer}")
        if answer is None:
            seen_all.set()
        return ()

    monkeypatch.setattr(training.requests, "requesters", requesters)
    assert seen_all.wait(PATIENCE_SECONDS)
    told = [record.getMessage().split()[-2] for record in caplog.records]
    assert told == ["gone", "back", "gone"]


def test_it_ends_with_its_client(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def requesters() -> Collection[str]:
        raise gradserve.CallCancelledError("the client is closed")

    monkeypatch.setattr(training.requests, "requesters", requesters)
    training.attendant._thread.join(PATIENCE_SECONDS)
    assert not training.attendant._thread.is_alive()
