"""The remembered rounds of accumulators and parameters."""

from collections.abc import Sequence

import numpy as np
import pytest

from gradserve_server.accumulators.durable.restoring import unlimited_calls
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.rounds import KEPT_ROUNDS, NOT_FINITE, Outcome, Round
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.observe.observed import UpdateHistories
from gradserve_server.observe.rounds import MOST_LATE, MOST_WORKERS, OTHERS, Histories, History
from gradserve_server.parameters.closing import Reason
from gradserve_server.parameters.ledger import UpdateLedger, VersionLoaded
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.round_rules import RoundRules, Staleness
from gradserve_server.parameters.spec import ParametersSpec, Rules
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
    history.on_refusal(InvalidArgumentError("no"))
    history.on_refusal(InvalidArgumentError("no", code=NOT_FINITE))
    history.on_close()
    totals = watched.all.totals
    assert (totals.accepted, totals.duplicate, totals.refused, totals.rounds.count) == (2, 2, 2, 1)
    assert totals.not_finite == 1
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


class WatchedParameters(Watched):
    """Parameters of which only the observer and the ledger are there."""

    def __init__(self) -> None:
        super().__init__()
        component = ComponentSpec("w", np.dtype(np.float32), PartialShape((1,)))
        rules = Rules(Sgd(1.0, 0.0, 0.0, 0.0, False), RoundRules(2))
        self.ledger = UpdateLedger(
            unlimited_calls(), ParametersSpec((component,), rules, staleness=Staleness(3)), lambda: self.now
        )
        self.ledger.end_round(VersionLoaded(None))
        self.updates = UpdateHistories(self.all)
        self.history = self.updates.begin(ResourceKey("default", "llm"), self.ledger)

    def push(self, worker_id: str, local_step: int, weight: float = 1.0) -> None:
        """Judges an update, as parameters do."""
        update = Gradient({"w": np.zeros(1, np.float32)})
        event = self.ledger.judge(
            None, Contribution(local_step, weight, worker_id), update, one_per_worker=True, awaits_average=False
        )
        self.ledger.answer(event)
        self.history.on_answer(event.contribution, event.outcome, 4)

    def end(self, reason: Reason, apply_seconds: float = 0.0) -> None:
        """Ends the round."""
        self.ledger.reason = reason
        event = self.ledger.ending(None)
        self.now += apply_seconds
        self.ledger.applied()
        self.history.on_round_end(self.ledger.end_round(event), 2)


def test_rounds_of_parameters_have_their_reason_the_time_of_the_optimizer_and_the_staleness_of_updates() -> None:
    watched = WatchedParameters()
    watched.push("a", 0)
    watched.end("deadline", apply_seconds=0.25)
    for worker, local_step in (("a", 1), ("b", 0), ("b", 1)):
        watched.push(worker, local_step)
    watched.end("required")
    history = watched.history
    assert [(each.step, each.reason, each.apply_seconds, each.staleness) for each in history.rounds] == [
        (1, "deadline", 0.25, (0,)),
        (2, "required", 0.0, (0, 1)),
    ]
    assert history.reasons == {"deadline": 1, "required": 1}
    assert (history.accepted, history.duplicate) == (3, 1)
    assert (watched.updates.applying.count, watched.updates.applying.total) == (2, 0.25)
    assert (watched.all.totals.staleness.count, watched.all.totals.staleness.counts[:2]) == (3, [2, 1])
    assert watched.updates.of(history.key) is history


def test_updates_that_are_dropped_at_a_load_are_in_no_round() -> None:
    watched = WatchedParameters()
    watched.push("a", 0)
    watched.history.on_drop()
    watched.ledger.end_round(VersionLoaded(None, step=5))
    watched.push("b", 5)
    watched.end("required")
    assert [(each.workers, each.staleness) for each in watched.history.rounds] == [(("b",), (0,))]
    weights = watched.ledger.weights
    assert (weights.accepted, weights.applied, weights.pending, weights.dropped) == (2.0, 1.0, 0.0, 1.0)


def test_very_many_updates_keep_the_staleness_of_those_whose_arrival_is_kept() -> None:
    watched = WatchedParameters()
    watched.push("first", 0)
    watched.end("required")
    for number in range(1500):
        watched.push(f"worker {number}", 0 if number == 1499 else 1)
    watched.end("required")
    latest = watched.history.rounds[-1]
    assert (len(latest.workers), latest.workers[-1]) == (1000, "worker 1499")
    assert (len(latest.staleness), latest.staleness[-1], sum(latest.staleness)) == (1000, 1, 1)
