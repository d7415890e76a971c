"""What becomes of a run whose name is used again, and what workers say about their part in it."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.training import joining
from gradserve.training.rounds import DropLog, WaitLog
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.training.replicas import Replica, have_equal_weights


@pytest.fixture
def _nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll call does not wait: for runs that are over."""
    monkeypatch.setattr(joining, "_ROLL_CALL_SECONDS", 0.0)


@pytest.fixture
def _roll_calls_are_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_ROLL_CALL_SECONDS", PATIENCE_SECONDS)


def ended(client: gradserve.Client, name: str) -> Replica:
    """Returns the only worker of a run that is over at step 2."""
    with Replica(client, name, "old", 2).begin() as old, Replica(client, name, "older", 2).begin() as older:
        for _ in range(2):
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(Replica.train, (old, older)))
    return old


@pytest.mark.usefixtures("_nobody_answers")
def test_all_workers_begin_the_same_new_run(client: gradserve.Client, name: str) -> None:
    old = ended(client, name)
    workers = [Replica(client, name, f"new-{number}", 2, if_exists="new") for number in range(4)]
    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(Replica.begin, workers))
    assert have_equal_weights(*workers)
    assert [each.step for each in workers] == [0] * 4
    assert not np.array_equal(workers[0].weights, old.weights)
    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(Replica.train, workers[:2]))
    assert [each.step for each in workers[:2]] == [1, 1]
    for each in workers:
        each.worker.close()


@pytest.mark.usefixtures("_roll_calls_are_patient")
def test_a_run_whose_workers_are_there_is_joined(client: gradserve.Client, name: str) -> None:
    first, second = (Replica(client, name, each, 2).begin() for each in ("first", "second"))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Replica.train, (first, second)))
        second.worker.close()
        waiting = threads.submit(first.train)
        new = Replica(client, name, "new", 2, if_exists="new").begin()
        assert (new.num_loaded, new.step) == (1, 1)
        new.train()
        waiting.result()
    assert have_equal_weights(first, new)
    for each in (first, new):
        each.worker.close()


@pytest.mark.usefixtures("_roll_calls_are_patient")
def test_answers_that_are_taken_with_others(client: gradserve.Client, name: str) -> None:
    """A worker that answers a request takes all of them, roll calls and their answers included."""
    with Replica(client, name, "first", 1).begin() as first, ThreadPoolExecutor(1) as threads:
        first.train()
        calls = joining.Joining(client, first.worker._run.id, "", "calls")
        other = joining.Joining(client, first.worker._run.id, "", "other")
        first.worker.close()
        called = threads.submit(calls.is_anybody_there)
        eventually(lambda: calls._requests.info().num_accumulated == 1)
        calls._requests.take_grad(1)
        eventually(lambda: calls._requests.info().num_accumulated == 1)
        other.requesters()
        assert called.result()


def test_a_worker_that_does_nothing_but_compute_is_there(client: gradserve.Client, name: str) -> None:
    with Replica(client, name, "first", 1).begin() as first:
        first.train()
        asking = joining.Joining(client, first.worker._run.id, "", "asks")
        for _ in range(2):  # the attendant now waits for a state that rests, and answers all the same
            assert asking.is_anybody_there()
            asking._ask()
        asking._withdraw()
        assert asking.requesters() == ()


@pytest.mark.usefixtures("_nobody_answers")
def test_a_successor_that_has_been_stopped(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(client, name)
    monkeypatch.setattr("gradserve.training.run._SUCCESSION_SECONDS", 0.0)
    monkeypatch.setattr("gradserve.training.run.is_successor", lambda *_: False)
    with pytest.raises(gradserve.DeadlineExceededError, match="was to delete training run"):
        Replica(client, name, "new", 2, if_exists="new").begin()


def test_a_choice_that_there_is_not(client: gradserve.Client, name: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="if_exists"):
        Replica(client, name, "new", 2, if_exists="replace")


class TestLog:
    def test_how_a_worker_begins(self, client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "gradserve.training")
        with Replica(client, name, "first", 1).begin() as first:
            first.train()
        Replica(client, name, "second", 1).begin().worker.close()
        Replica(client, name, "third", 1).begin(start_step=1).worker.close()
        run = f"training run {name!r}"
        loggers = ("gradserve.training.run", "gradserve.training.worker")
        assert [each.message for each in caplog.records if each.name in loggers] == [
            f"worker 'first' is in {run} at step 0 and begins it; a round needs 1 gradients",
            f"worker 'second' asks for the state of {run} at step 1",
            f"worker 'second' is in {run} at step 1 and joins it with the state of another worker; a round needs 1 "
            "gradients",
            f"worker 'third' is in {run} at step 1 and goes on from a checkpoint of step 1; a round needs 1 gradients",
        ]

    def test_a_wait(self, client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "gradserve.training")
        accumulator = client.gradient_accumulator({"w": np.zeros(1, np.float32)}, name)
        accumulator.apply_grad({"w": [1]}, worker_id="a")
        now = [100.0]
        waits = WaitLog("net", "a", 3, lambda: now[0])
        waits.look(accumulator)
        with waits.waiting(0, ("a", "b")):
            for now[0] in (104.9, 105.0, 106.0, 134.9, 135.0, 136.0):
                waits.look(accumulator)
        waits.look(accumulator)
        with waits.waiting(0, ()):
            now[0] += 5
            waits.look(accumulator)
        with waits.waiting(7, ()):  # the round has ended, and the answer is on its way
            now[0] += 5
            waits.look(accumulator)
        text = "worker 'a' of training run 'net' has waited %d s at step 0: 1 of 3 gradients are in (workers: a)%s"
        missing = "; missing of the round before: b"
        assert [each.message for each in caplog.records] == [text % (5, missing), text % (35, missing), text % (5, "")]

    def test_the_attendant_looks(self, client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        looked = threading.Event()
        monkeypatch.setattr(WaitLog, "look", lambda *_: looked.set())
        with Replica(client, name, "first", 1).begin():
            assert looked.wait(PATIENCE_SECONDS)

    def test_gradients_that_are_dropped(
        self, client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Replica(client, name, "early", 1).begin() as early, Replica(client, name, "late", 1).begin() as late:
            for _ in range(2):
                early.train()
            caplog.set_level(logging.INFO, "gradserve.training")
            late.train()
            late.train()
        assert [each.message for each in caplog.records] == [
            f"the gradient of worker 'late' at step 0 of training run {name!r} was dropped: its round had ended "
            "without it, and the run was at step 2"
        ]

    @pytest.mark.parametrize(
        ("dropped", "num_warnings"),
        [([False, True] * 30, 0), ([True] * 10, 0), ([True] * 11, 1), ([True] * 100, 1), ([True] * 120, 2)],
    )
    def test_most_of_them(self, caplog: pytest.LogCaptureFixture, dropped: list[bool], num_warnings: int) -> None:
        drops = DropLog("net", "w")
        for step, each in enumerate(dropped):
            drops.note(step, step + 2, was_dropped=each)
        warned: list[Any] = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warned) == num_warnings
        assert all("of the last" in each.message and "num_required" in each.message for each in warned)
