"""Workers that come later, die, or are started again."""

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from gradserve.training import State, Worker
from gradserve.training.joining import Joining
from gradserve.training.state import Carried
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.training.replicas import Replica, have_equal_weights, waits_for_its_round


@pytest.mark.parametrize("dead_id", ["x-dead", "a-dead"], ids=["the one that should answer lives", "it has died"])
def test_a_worker_joins_while_others_wait_for_it(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor, dead_id: str
) -> None:
    """One of two has died, two are required: the one that is left waits for the new one, and lets it in meanwhile."""
    left, dead = Replica(client, name, "left", 2).begin(), Replica(client, name, dead_id, 2).begin()
    for step in (threads.submit(left.train), threads.submit(dead.train)):
        step.result()
    dead.worker.close()

    waiting = waits_for_its_round(left, threads)
    with Replica(client, name, "new", 2).begin() as new:
        assert (new.step, new.num_loaded) == (1, 1)
        assert np.array_equal(new.weights, left.weights)
        new.train()
        waiting.result()
        assert have_equal_weights(left, new)
        assert left.step == 2
    left.worker.close()


def test_another_worker_answers_when_the_state_of_the_one_that_should_is_not_at_hand(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor
) -> None:
    """Its memory belongs to a compiled program, for example."""
    without, left = Replica(client, name, "a", 2).begin(), Replica(client, name, "left", 2).begin()
    for step in (threads.submit(left.train), threads.submit(without.train)):
        step.result()
    asked = threading.Event()

    def nothing() -> None:
        asked.set()

    without.worker.close()
    without.worker.begin(nothing, start_step=1)
    waiting = waits_for_its_round(without, threads)
    joining = threads.submit(Replica(client, name, "new", 2).begin)
    assert asked.wait(PATIENCE_SECONDS)
    left.train()
    waiting.result()
    with left:
        pass
    new = joining.result()
    assert have_equal_weights(left, new)
    new.worker.close()
    with without:
        pass


def test_a_worker_cannot_begin_without_a_state(client: gradserve.Client, name: str) -> None:
    replica = Replica(client, name, "a", 1)
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected the state that this worker begins with, got None"
    ):
        replica.worker.begin(lambda: None)


def test_a_newcomer_takes_nobody_down(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """The states of those who train cannot be sent any more: they go on, and each newcomer is told why."""

    def replica(worker_id: str) -> Replica:
        # No step takes any time, so many are made while a state is on its way.
        return Replica(client, name, worker_id, 2, keep_averages=1000)

    first, second = replica("first").begin(), replica("second").begin()
    for each in (first, second):
        each.worker._attendant._state = lambda: State({"w": np.zeros(2)}, {"by": print})  # type: ignore[union-attr]

    def step() -> None:
        for each in [threads.submit(each.train) for each in (first, second)]:
            each.result()

    step()
    for _ in range(2):
        newcomer = threads.submit(replica("new").begin)
        while not newcomer.done():
            step()
        with pytest.raises(
            gradserve.InvalidArgumentError, match=r"worker '(first|second)' is training and cannot .*'by'.*start_step="
        ):
            newcomer.result()
    for each in (first, second):
        each.worker._attendant._state = each.state  # type: ignore[union-attr]
    newcomer = threads.submit(replica("new").begin)
    while not newcomer.done():
        step()
    assert newcomer.result().num_loaded == 1
    for each in (first, second, newcomer.result()):
        each.worker.close()
    told = [each.getMessage() for each in caplog.records if "cannot send its state" in each.getMessage()]
    assert 1 <= len(told) == len(set(told))


def test_several_join_at_once(client: gradserve.Client, name: str, threads: ThreadPoolExecutor) -> None:
    first = Replica(client, name, "first", 3).begin(start_step=1)
    waiting = waits_for_its_round(first, threads)
    others = [Replica(client, name, each, 3) for each in ("second", "third")]
    list(threads.map(Replica.begin, others))
    list(threads.map(Replica.train, others))
    waiting.result()
    assert have_equal_weights(first, *others)
    for each in (first, *others):
        each.worker.close()


def test_a_worker_that_comes_when_all_have_left_gets_the_last_state(client: gradserve.Client, name: str) -> None:
    with Replica(client, name, "first", 1).begin() as first:
        for _ in range(9):
            first.train()
    with Replica(client, name, "later", 1).begin() as later:
        assert have_equal_weights(first, later)
        assert later.step == 9


def test_a_state_that_is_gone_is_asked_for_again(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor
) -> None:
    """The server has forgotten it, because nobody has used it for long: here, somebody has deleted it."""
    with Replica(client, name, "first", 2).begin(start_step=1) as first:
        pass
    for each in client.list_accumulators():
        if each.name.startswith(f"{name}/") and each.name.endswith("/state"):
            client.delete_accumulator(each.name)
    again = Replica(client, name, "first", 2)
    again.weights = first.weights
    waiting = waits_for_its_round(again.begin(start_step=1), threads)
    with Replica(client, name, "second", 2).begin() as second:
        second.train()
        waiting.result()
        assert have_equal_weights(again, second)
    again.worker.close()


def test_states_that_arrive_too_late(client: gradserve.Client, name: str, threads: ThreadPoolExecutor) -> None:
    """The others do not wait, and take more steps than averages are kept while the state travels: that has an end."""
    joining = Joining(client, name, "", "new")
    receiving = threads.submit(joining.receive, None, lambda _step: False)
    others = Joining(client, name, "", "other")
    steps = itertools.count(1)
    while eventually(lambda: receiving.done() or others.requesters()) is not True:
        others.answer(Carried.of(State({"w": np.zeros(2)})), next(steps))
    with pytest.raises(gradserve.DeadlineExceededError, match=r"the last one of step 1\d: .* a larger keep_averages"):
        receiving.result()


def test_the_last_worker_leaves_just_before_it_is_asked(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found nobody who waits; whoever asks then finds what it has left."""
    leaving, late = Joining(client, name, "", "leaving"), Joining(client, name, "", "late")

    def leave_and_ask() -> int:
        leaving.answer(Carried.of(State({"w": np.ones(3, np.float32)})), 9)
        return Joining._ask(late)

    monkeypatch.setattr(late, "_ask", leave_and_ask)
    assert late.receive(PATIENCE_SECONDS, lambda step: step == 9).step == 9
    assert leaving.requesters() == ()


def test_two_workers_that_send_their_states_at_once_leave_one_that_can_be_read(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to send its state is the last to say so; by then, the state of the other has taken its place."""
    slow, quick, late = (Joining(client, name, "", each) for each in ("slow", "quick", "late"))
    values = {
        each: Carried.of(State({"w": np.full(2, number, np.float32)})) for number, each in enumerate(("slow", "quick"))
    }
    send = slow._send

    def send_while_the_other_does(accumulator: gradserve.GradientAccumulator, sent: object) -> int:
        if accumulator is slow._answers:
            quick.answer(values["quick"], 7)
        return send(accumulator, sent)

    monkeypatch.setattr(slow, "_send", send_while_the_other_does)
    slow.answer(values["slow"], 7)
    received = late.receive(0.0, lambda _step: True)
    assert received.step == 7
    assert np.array_equal(np.asarray(received.state.tensors["w"]), [1.0, 1.0])


def test_nobody_is_left_to_answer(client: gradserve.Client, name: str) -> None:
    first = Replica(client, name, "first", 1).begin()
    first.train()
    first.worker.close()  # as if it had died: it has not left its state
    with pytest.raises(gradserve.DeadlineExceededError) as raised:
        Replica(client, name, "second", 1, timeout=0.1).begin()
    (note,) = raised.value.__notes__
    assert "is at step 1" in note
    assert "start_step" in note
    # The one that gave up is not taken for one that waits.
    assert Joining(client, first.worker._run.id, "", "third").requesters() == ()


class TestCheckpoint:
    """A worker with parameters of its own from some step."""

    def test_of_the_current_step(self, client: gradserve.Client, name: str) -> None:
        with Replica(client, name, "first", 1).begin() as first:
            first.train()
            with Replica(client, name, "second", 1) as second:
                second.weights = first.weights
                assert second.begin(start_step=1).num_loaded == 0
                second.train()
                assert second.step == 2

    def test_of_an_earlier_step(self, client: gradserve.Client, name: str) -> None:
        with Replica(client, name, "first", 1).begin() as first:
            checkpoint = first.weights
            first.train()
            first.train()
            with Replica(client, name, "second", 1) as second:
                second.weights = checkpoint
                second.begin(start_step=0)
                assert len(second.train().averages) == 2
                assert have_equal_weights(first, second)

    def test_on_a_server_that_has_not_seen_the_run(self, client: gradserve.Client, name: str) -> None:
        with Replica(client, name, "first", 1).begin(start_step=70) as first:
            first.train()
            assert first.step == first.worker.accumulator.info().global_step == 71

    def test_that_cannot_be(self, client: gradserve.Client, name: str) -> None:
        with (
            Replica(client, name, "first", 1) as first,
            pytest.raises(gradserve.InvalidArgumentError, match="not negative, got -1"),
        ):
            first.begin(start_step=-1)

    def test_a_worker_that_would_begin_anew(self, client: gradserve.Client, name: str) -> None:
        with Replica(client, name, "first", 1).begin() as first:
            first.train()
        with (
            Replica(client, name, "second", 1, if_exists="error") as second,
            pytest.raises(gradserve.AlreadyExistsError, match=r"is at step 1, .* would start at step 0.*start_step"),
        ):
            second.begin()

    def test_too_old_for_the_only_worker(self, client: gradserve.Client, name: str) -> None:
        """The averages in between are gone, and nobody has another state: the error says what to do, and that works."""
        first = Replica(client, name, "first", 1, keep_averages=2).begin()
        checkpoint = first.weights
        for _ in range(5):
            first.train()
        first.worker.close()
        again = Replica(client, name, "again", 1, keep_averages=2, timeout=0.1)
        again.begin(start_step=1)
        with pytest.raises(gradserve.DeadlineExceededError) as raised:
            again.train()
        again.worker.close()
        assert raised.value.__notes__ == [
            f"Training run '{name}' is at step 5 and this worker at step 1, but the server keeps averages only "
            "from step 4 on, and no other worker has sent its state in time. Go on from a checkpoint of step 3 or"
            f" later; or repeat the steps since then: delete accumulator '{name}' and start all workers with "
            "start_step=1. So that it does not happen again, save checkpoints more often, or start all workers "
            "with a larger keep_averages than 2: at least the number of steps between two checkpoints."
        ]
        with Replica(client, name, "of step 3", 1, keep_averages=2, timeout=0.1) as later:
            assert len(later.begin(start_step=3).train().averages) == 2
        client.delete_accumulator(name)
        with Replica(client, name, "repeats", 1, keep_averages=4) as repeats:
            repeats.weights = checkpoint
            repeats.begin(start_step=1)
            repeats.train()
            assert repeats.step == 2
            assert repeats.num_loaded == 0


class TestTheEndOfABlock:
    """What only others need is no error for a worker that has finished, but one warning."""

    def warned_of(self, caplog: pytest.LogCaptureFixture) -> str:
        (record,) = [each for each in caplog.records if each.name == "gradserve.training.worker"]
        assert record.levelname == "WARNING"
        return record.getMessage()

    def test_after_the_server_has_gone(self, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
        with (
            ServerProcess(tmp_path, "--warm-up", "false") as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            Replica(client, name, "a", 1).begin() as replica,
        ):
            replica.train()
            server.kill()
        assert "worker 'a' has left" in self.warned_of(caplog)
        assert "at step 1" in self.warned_of(caplog)

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (lambda: State({"w": np.zeros(2)}, {"made_by": object()}), "made_by|JSON"),
            (lambda: 1 / 0, "division by zero"),
        ],
        ids=["one that cannot travel", "one whose description fails"],
    )
    def test_with_a_state(
        self, client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture, state: Any, message: str
    ) -> None:
        with Replica(client, name, "a", 1).begin() as replica:
            replica.train()
            replica.worker._state = state
        assert re.search(message, self.warned_of(caplog))

    def test_when_nobody_has_joined_for_so_long_that_answers_are_gone(
        self, client: gradserve.Client, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Replica(client, name, "a", 1).begin() as replica:
            replica.train()
            for each in client.list_accumulators():
                if each.name.startswith(f"{name}/") and each.name.endswith(("/answers", "/requests")):
                    client.delete_accumulator(each.name)
        with Replica(client, name, "b", 1).begin() as later:
            assert have_equal_weights(replica, later)
        assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_an_accumulator_that_is_deleted_is_not_made_again(client: gradserve.Client, name: str) -> None:
    with Replica(client, name, "first", 1).begin() as first:
        first.train()
        first.worker.accumulator.delete()
        with pytest.raises(gradserve.GradserveError) as raised:
            first.train()
        assert "start this worker again" in raised.value.__notes__[0]
        assert client.list_accumulators() is not None
        first.worker.close()


class TestARunThatBeginsAnew:
    """Somebody has deleted the accumulator of an earlier run of this name."""

    def test_nothing_is_left_of_the_earlier_one(self, client: gradserve.Client, name: str) -> None:
        with Replica(client, name, "earlier", 1).begin() as earlier:
            for _ in range(3):
                earlier.train()
        client.delete_accumulator(name)
        with Replica(client, name, "first", 1) as first:
            own = first.weights
            assert first.begin().num_loaded == 0
            assert np.array_equal(first.weights, own)
            first.train()
        with Replica(client, name, "second", 1).begin() as second:
            assert have_equal_weights(first, second)
            assert second.step == 1

    def test_it_can_have_another_model(self, client: gradserve.Client, name: str) -> None:
        with Worker(client, {"w": np.zeros(2)}, name=name, num_required=1) as earlier:
            earlier.begin(lambda: State({"w": np.zeros(2)}))
            earlier.exchange({"w": np.ones(2)})
        client.delete_accumulator(name)
        with Worker(client, {"v": np.zeros(3)}, name=name, num_required=1) as worker:
            assert worker.begin(lambda: State({"v": np.zeros(3)})) is None
