"""Workers that come later, die, or are started again."""

import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.retries import RetryPolicy
from gradserve.testing import ServerProcess
from gradserve.training import Advance, State, Worker
from gradserve.training.joining import Joining
from gradserve.training.state import Carried
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.training.replicas import Replica, have_equal_weights


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def waits_for_its_round(replica: Replica, threads: ThreadPoolExecutor) -> Future[Advance]:
    """Begins a step of a worker, and returns when its gradient is in."""
    before = replica.worker.accumulator.num_accumulated()
    waiting = threads.submit(replica.train)
    eventually(replica.worker.accumulator.num_accumulated, lambda num: num > before)
    return waiting


def test_a_worker_joins_while_others_wait_for_it(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor
) -> None:
    """One of two has died, two are required: the one that is left waits for the new one, and lets it in meanwhile."""
    left, dead = Replica(client, name, "left", 2).begin(), Replica(client, name, "x-dead", 2).begin()
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


def test_another_worker_answers_when_the_one_that_should_has_died(
    client: gradserve.Client, name: str, threads: ThreadPoolExecutor
) -> None:
    dead, left = Replica(client, name, "a-dead", 2).begin(), Replica(client, name, "left", 2).begin()
    for step in (threads.submit(left.train), threads.submit(dead.train)):
        step.result()
    dead.worker.close()

    waiting = waits_for_its_round(left, threads)
    with Replica(client, name, "new", 2).begin() as new:
        new.train()
        waiting.result()
        assert have_equal_weights(left, new)
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


WITH_AND_WITHOUT_STATE = pytest.mark.parametrize(
    "flags", [(), ("--state-dir",)], ids=["without a state directory", "with one"]
)


class TestRestartOfTheServer:
    """The workers go on by themselves."""

    @WITH_AND_WITHOUT_STATE
    def test_between_two_steps(
        self,
        tmp_path: Path,
        name: str,
        threads: ThreadPoolExecutor,
        flags: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        state = (*flags, str(tmp_path / "state")) if flags else ()
        with (
            ServerProcess(tmp_path, *state) as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
        ):
            one = Replica(client, name, "one", 2).begin()
            two = Replica(other_client, name, "two", 2).begin()
            for turn in range(4):
                for step in [threads.submit(each.train) for each in (one, two)]:
                    step.result()
                assert have_equal_weights(one, two)
                assert one.step == turn + 1
                if turn == 1:
                    server.kill()
                    server.restart()
            one.worker.close()
            two.worker.close()

    @WITH_AND_WITHOUT_STATE
    @pytest.mark.parametrize("num_joined", [0, 1], ids=["nobody has joined before", "a worker has joined before"])
    def test_before_others_join_and_all_end(
        self, tmp_path: Path, name: str, flags: tuple[str, ...], num_joined: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it has lost of earlier answers stops neither the end of a block nor those who join later."""
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        state = (*flags, str(tmp_path / "state")) if flags else ()
        with (
            ServerProcess(tmp_path, "--warm-up", "false", *state) as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
        ):
            with Replica(client, name, "a", 1).begin() as first:
                first.train()
                for number in range(num_joined):
                    with Replica(other_client, name, f"b-{number}", 1) as joined, training(first):
                        joined.begin()
                        assert joined.num_loaded == 1
                server.kill()
                server.restart()
                first.train()
                with Replica(other_client, name, "c", 1) as late, training(first):
                    late.begin()
                    assert late.num_loaded == 1
                first.train()
            with Replica(other_client, name, "d", 1).begin() as last:
                assert have_equal_weights(first, last)

    @pytest.mark.parametrize("first", ["the one behind", "the one ahead"])
    def test_that_loses_the_rounds_between_two_workers(
        self, tmp_path: Path, name: str, first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody knows the average between their steps any more: one of them has to take the other's parameters."""
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        with (
            ServerProcess(tmp_path, "--warm-up", "false") as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
        ):
            ahead, behind = Replica(client, name, "a", 1).begin(), Replica(other_client, name, "b", 1).begin()
            loaded = ahead.num_loaded + behind.num_loaded
            ahead.train()
            behind.train()
            ahead.train()
            assert (ahead.step, behind.step) == (2, 1)
            server.kill()
            server.restart()
            one, other = (behind, ahead) if first == "the one behind" else (ahead, behind)
            one.train()
            with training(one):
                other.train()
            ahead.train()
            behind.train()
            if ahead.step > behind.step:
                behind.train()
            if behind.step > ahead.step:
                ahead.train()
            assert have_equal_weights(ahead, behind)
            assert ahead.num_loaded + behind.num_loaded > loaded
            for each in (ahead, behind):
                each.worker.close()

    @pytest.mark.parametrize("is_newcomer_first", [False, True])
    def test_before_the_first_round(
        self,
        tmp_path: Path,
        name: str,
        threads: ThreadPoolExecutor,
        is_newcomer_first: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Those who have begun, and one that begins afterwards, have the same parameters."""
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        with (
            ServerProcess(tmp_path, "--warm-up", "false") as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
        ):
            early = Replica(client, name, "early", 2).begin()
            run = early.worker._run.id
            server.kill()
            server.restart()
            if is_newcomer_first:
                late = Replica(other_client, name, "late", 2).begin()
                assert early.train().state is not None
                waiting = waits_for_its_round(early, threads)
            else:
                waiting = threads.submit(early.train)
                eventually(lambda: early.worker._run.id != run and early.worker.accumulator.num_accumulated())
                late = Replica(other_client, name, "late", 2).begin()
            late.train()
            waiting.result()
            assert have_equal_weights(early, late)
            for each in (early, late):
                each.worker.close()

    def test_that_another_thread_of_the_worker_sees_first(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread that looks for joiners asks for the accumulator, too: that takes nothing from the training."""
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        with (
            ServerProcess(tmp_path, "--warm-up", "false") as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
        ):
            replica = Replica(client, name, "one", 1).begin()
            replica.train()
            server.kill()
            server.restart()
            for _ in range(2):
                with pytest.raises(gradserve.LostError, match="its step, 1"):
                    replica.worker.accumulator.info()
            assert replica.train().step == 2
            replica.worker.close()

    def test_while_a_worker_waits_for_a_state(
        self, tmp_path: Path, name: str, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        with (
            ServerProcess(tmp_path, "--warm-up", "false", "--state-dir", str(tmp_path / "state")) as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other_client,
        ):
            with Replica(client, name, "a", 1).begin() as first:
                first.train()
                joining = threads.submit(Replica(other_client, name, "b", 1).begin)
                eventually(first.worker._run.joining.requesters)
                server.kill()
                server.restart()
                with training(first):
                    assert joining.result().num_loaded == 1
            joining.result().worker.close()

    def test_they_wait_for_it_as_long_as_for_others(
        self, tmp_path: Path, name: str, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other calls of the client give up as soon as the server is gone."""
        impatient = RetryPolicy(pauses=(), restart_patience=0.1, restart_pause=0.1)
        monkeypatch.setattr(RetryPolicy, "wanted", lambda _environment: impatient)
        with (
            ServerProcess(tmp_path) as server,
            gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
        ):
            replica = Replica(client, name, "one", 1).begin()
            replica.train()
            server.kill()
            with pytest.raises(gradserve.UnavailableError):
                client.server_info()
            waiting = threads.submit(replica.train)
            for _ in range(3):
                with pytest.raises(gradserve.UnavailableError):
                    client.server_info()
            assert not waiting.done()
            server.restart()
            assert waiting.result().step == 2
            replica.worker.close()


@contextmanager
def training(replica: Replica) -> Iterator[None]:
    """Lets a worker train in a thread during a block."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.01):
            replica.train()

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train)
        try:
            yield
        finally:
            is_over.set()
        trained.result()


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
