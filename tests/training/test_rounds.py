"""Workers at equal steps have equal weights, whoever is late."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradserve
from gradserve.training import State, Worker
from tests.training.replicas import SIZE, Replica, have_equal_weights


def test_workers_begin_with_the_weights_of_the_first(client: gradserve.Client, name: str) -> None:
    with Replica(client, name, "first", 1) as first, Replica(client, name, "second", 1) as second:
        own = first.weights
        assert first.begin().num_loaded == 0
        assert second.begin().num_loaded == 1
        assert have_equal_weights(first, second)
        assert np.array_equal(first.weights, own)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_step_is_that_of_one_process_on_all_data(client: gradserve.Client, name: str, num_workers: int) -> None:
    gradients = np.arange(num_workers * SIZE, dtype=np.float32).reshape(num_workers, SIZE)
    weights = np.arange(1.0, num_workers + 1)
    replicas = [Replica(client, name, f"worker-{number}", num_workers).begin() for number in range(num_workers)]
    before = replicas[0].weights
    with ThreadPoolExecutor(num_workers) as threads:
        list(threads.map(Replica.train, replicas, gradients, weights))
    assert have_equal_weights(*replicas)
    joined = np.average(gradients.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(replicas[0].weights, before - 0.1 * joined, rtol=1e-5, atol=1e-5)
    for replica in replicas:
        replica.worker.close()


@pytest.mark.parametrize("num_missed", [1, 2, 4])
def test_a_late_worker_applies_what_it_missed(client: gradserve.Client, name: str, num_missed: int) -> None:
    with Replica(client, name, "fast", 1).begin() as fast, Replica(client, name, "late", 1).begin() as late:
        for _ in range(num_missed):
            assert not fast.train().was_late
        advance = late.train()
        assert (advance.was_late, len(advance.averages), advance.state) == (True, num_missed, None)
        assert have_equal_weights(fast, late)
        assert not late.train().was_late
        assert late.step == num_missed + 1


def test_a_worker_that_is_later_than_averages_are_kept_gets_a_state(client: gradserve.Client, name: str) -> None:
    late = Replica(client, name, "late", 1, keep_averages=2).begin()
    with Replica(client, name, "fast", 1, keep_averages=2).begin() as fast:
        for _ in range(3):
            fast.train()
    # The fast one has left its last state.
    with late:
        advance = late.train()
        assert advance.was_late
        assert not advance.averages
        assert have_equal_weights(fast, late)
        assert not late.train().was_late


def test_backup_workers(client: gradserve.Client, name: str) -> None:
    """Rounds end with the gradients of three of four workers; each time another one is late."""
    with ThreadPoolExecutor(4) as threads:
        replicas = [Replica(client, name, f"worker-{number}", 3).begin() for number in range(4)]
        for turn in range(8):
            late = replicas[turn % 4]
            in_time = [replica for replica in replicas if replica is not late]
            advances = list(threads.map(Replica.train, in_time))
            assert not any(each.was_late for each in advances)
            assert late.train().was_late
            assert have_equal_weights(*replicas)
            assert late.step == turn + 1
    for replica in replicas:
        replica.worker.close()


def test_a_worker_that_gave_up_waiting_waits_on(client: gradserve.Client, name: str) -> None:
    impatient = Replica(client, name, "impatient", 2, timeout=0.05).begin()
    with impatient, Replica(client, name, "slow", 2).begin() as slow, ThreadPoolExecutor(1) as threads:
        with pytest.raises(
            gradserve.DeadlineExceededError,
            match=r"(?m)did not get the 2 .*; to wait on, make the same call again \[",
        ):
            impatient.train()
        other = threads.submit(slow.train)
        while impatient.step == 0:
            try:
                impatient.train()
            except gradserve.DeadlineExceededError:
                continue
        assert other.result().averages[0].num_gradients == 2
        assert have_equal_weights(impatient, slow)


def test_a_parameter_that_no_worker_had_is_not_in_the_average(client: gradserve.Client, name: str) -> None:
    """A late worker gets the same: what was missing travels with the averages."""
    weights = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
    workers = [
        Worker(client, weights, name=name, num_required=1, worker_id=each, missing="zeros")
        for each in ("early", "late")
    ]
    for worker in workers:
        worker.begin(lambda: State(weights))
    early, late = workers
    zeros, ones = np.zeros(3, np.float32), np.ones(2, np.float32)
    gradients = ({"a": ones}, {"a": ones, "b": None}, {"a": ones, "b": zeros})
    given = [early.exchange(each).averages for each in gradients]
    assert [[list(average) for average in each] for each in given] == [[["a"]], [["a"]], [["a", "b"]]]
    assert [list(average) for average in late.exchange({"b": zeros}).averages] == [["a"], ["a"], ["a", "b"]]
    for worker in workers:
        worker.close()


def test_all_workers_treat_missing_gradients_alike(client: gradserve.Client, name: str) -> None:
    weights = {"a": np.ones(2, np.float32)}
    Worker(client, weights, name=name, num_required=1, missing="zeros")
    with pytest.raises(gradserve.AlreadyExistsError) as raised:
        Worker(client, weights, name=name, num_required=1)
    assert "num_required, keep_averages, missing" in raised.value.__notes__[0]
