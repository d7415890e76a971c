"""What is remembered of the rounds of accumulators."""

from collections.abc import Sequence

import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import Outcome, Round
from gradserve_server.observe.rounds import KEPT_ROUNDS, MOST_LATE, MOST_WORKERS, OTHERS, Histories, History
from gradserve_server.resources.registry import ResourceKey


class Watched:
    """Accumulators of which only the observers are there, and a clock that the test moves."""

    def __init__(self, most_arrivals: int = 1000) -> None:
        self.now = 100.0
        self.all = Histories(lambda: self.now, most_arrivals)

    def begin(self, name: str = "net") -> History:
        return self.all.begin(ResourceKey("default", name))

    def round(self, history: History, step: int, workers: Sequence[str], *, gap: float = 1.0) -> None:
        """Lets a round take place in which the workers come one after the other."""
        for worker in workers:
            self.now += gap
            history.on_answer(Contribution(step - 1, worker_id=worker), Outcome.ACCEPTED, 4)
        history.on_round_end(Round(step - 1, step), len(workers))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_round_has_its_workers_in_order_of_arrival(watched: Watched) -> None:
    history = watched.begin()
    watched.round(history, 1, ["b", "a", "c"], gap=2.0)
    (record,) = history.rounds
    assert (record.step, record.workers, list(record.times)) == (1, ("b", "a", "c"), [102.0, 104.0, 106.0])
    assert (record.began, record.ended, record.num_required) == (102.0, 106.0, 3)
    assert history.median_round_seconds == 4.0
    assert not history.times


def test_a_round_waits_for_whoever_comes_last(watched: Watched) -> None:
    history = watched.begin()
    for step in (1, 2):
        watched.round(history, step, ["a", "b"], gap=3.0)
    watched.round(history, 3, ["alone"], gap=50.0)
    assert watched.all.totals.waited_for == {"b": 6.0}


def test_late_gradients_belong_to_the_round_that_they_missed(watched: Watched) -> None:
    history = watched.begin()
    for step in (1, 2, 3):
        watched.round(history, step, ["a"])
    for local_step in (1, 0, 2, -5):
        watched.now += 0.5
        history.on_answer(Contribution(local_step, worker_id="slow"), Outcome.STALE, 4)
    assert [len(each.late) for each in history.rounds] == [1, 1, 1]
    assert list(history.rounds[1].late) == [("slow", 103.5)]
    assert history.stale == watched.all.totals.stale == 4
    assert watched.all.totals.staleness.total == 2 + 3 + 1 + 8
    for _ in range(2 * MOST_LATE):
        history.on_answer(Contribution(2, worker_id="slow"), Outcome.STALE, 4)
    assert len(history.rounds[2].late) == MOST_LATE


def test_the_last_rounds_are_kept(watched: Watched) -> None:
    history = watched.begin()
    for step in range(1, 3 * KEPT_ROUNDS):
        watched.round(history, step, ["a", "b"])
    assert [each.step for each in history.rounds] == list(range(2 * KEPT_ROUNDS, 3 * KEPT_ROUNDS))
    assert (history.num_rounds, history.num_kept) == (3 * KEPT_ROUNDS - 1, 2 * KEPT_ROUNDS)


def test_rounds_of_idle_accumulators_are_forgotten_first() -> None:
    watched = Watched(most_arrivals=8)
    idle, busy = watched.begin("idle"), watched.begin("busy")
    watched.round(idle, 1, ["a", "b", "c"])
    for step in (1, 2):
        watched.round(busy, step, ["a", "b", "c"])
    assert (idle.num_kept, busy.num_kept) == (0, 6)
    assert (idle.num_rounds, idle.accepted) == (1, 3)
    assert list(watched.all.latest()) == [busy]


def test_an_accumulator_whose_first_round_has_begun_is_among_the_latest(watched: Watched) -> None:
    older, newer = watched.begin("older"), watched.begin("newer")
    watched.round(older, 1, ["a"])
    assert list(watched.all.latest()) == [older]
    newer.on_answer(Contribution(0, worker_id="a"), Outcome.ACCEPTED, 4)
    assert list(watched.all.latest()) == [newer, older]
    watched.round(older, 2, ["a"])
    assert list(watched.all.latest()) == [older, newer]


def test_a_round_of_very_many_gradients_keeps_the_first_and_the_latest(watched: Watched) -> None:
    history = watched.begin()
    watched.round(history, 1, [f"worker {number}" for number in range(1500)], gap=0.01)
    (record,) = history.rounds
    assert len(record.workers) == 1000
    assert (record.workers[0], record.workers[-1]) == ("worker 0", "worker 1499")
    assert watched.all.totals.waited_for == {"worker 1499": pytest.approx(0.01)}


def test_the_rate_follows_what_happens(watched: Watched) -> None:
    history = watched.begin()
    for step in range(1, 51):
        watched.round(history, step, ["a"], gap=0.5)
    assert history.rounds_per_second == pytest.approx(2.0, rel=0.1)
    watched.now += 60.0
    assert history.rounds_per_second < 0.01


def test_a_young_accumulator_has_a_rate_at_once(watched: Watched) -> None:
    history = watched.begin()
    for step in range(1, 5):
        watched.round(history, step, ["a"], gap=0.5)
    assert history.rounds_per_second == pytest.approx(2.0, rel=0.2)


def test_counts_outlive_their_accumulators(watched: Watched) -> None:
    history = watched.begin()
    watched.round(history, 1, ["a", "b"])
    history.on_answer(Contribution(1, worker_id="a"), Outcome.ALREADY_COUNTED, 4)
    history.on_repeat()
    history.on_refusal()
    history.on_close()
    totals = watched.all.totals
    assert (totals.accepted, totals.duplicate, totals.refused, totals.rounds.count) == (2, 2, 1, 1)
    assert totals.accepted_bytes == 8
    assert len(watched.all) == 0
    assert not list(watched.all.latest())
    assert watched.all.of(history.key) is None


def test_another_accumulator_of_the_same_name_stays(watched: Watched) -> None:
    first = watched.begin()
    second = watched.begin()
    first.on_close()
    assert watched.all.of(second.key) is second


def test_names_of_workers_are_bounded_in_number(watched: Watched) -> None:
    history = watched.begin()
    for number in range(2 * MOST_WORKERS):
        watched.round(history, number + 1, ["first", f"worker {number}"])
    waited_for = watched.all.totals.waited_for
    assert len(waited_for) == MOST_WORKERS + 1
    assert waited_for[OTHERS] == MOST_WORKERS
