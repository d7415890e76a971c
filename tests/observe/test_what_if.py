"""Rounds replayed from recorded arrivals under other rules."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve_protocol.server_status import ArrivalStatus, RoundStatus
from gradserve_server.observe.what_if import FEWEST_ROUNDS, replay, times_of_workers, what_if

SECONDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8)


def rounds_of(times: Mapping[str, float], num_required: int, number: int = 10) -> Sequence[RoundStatus]:
    """Rounds of workers that always take the same time, and of which none is late."""
    in_order = sorted(times.items(), key=lambda pair: pair[1])
    counted, late = in_order[:num_required], in_order[num_required:]
    period, first = counted[-1][1], counted[0][1]
    arrivals = tuple(ArrivalStatus(worker, at - first) for worker, at in counted)
    arrivals += tuple(ArrivalStatus(worker, at - first, stale=True) for worker, at in late)
    return [
        RoundStatus(step, (step - 1) * period + first, step * period, num_required, arrivals)
        for step in range(1, number + 1)
    ]


def test_a_worker_takes_from_the_end_of_the_round_before_to_its_arrival() -> None:
    times = times_of_workers(rounds_of({"fast": 1.0, "slow": 3.0}, 2, number=4))
    assert times == {"fast": pytest.approx([1.0] * 3), "slow": pytest.approx([3.0] * 3)}


def test_a_late_worker_begins_when_its_gradient_has_arrived() -> None:
    rounds = [
        RoundStatus(1, 0.0, 1.0, 1, (ArrivalStatus("fast"),)),
        RoundStatus(2, 2.0, 2.0, 1, (ArrivalStatus("fast"), ArrivalStatus("slow", 0.5, stale=True))),  # at 2.5
        RoundStatus(3, 3.0, 3.0, 1, (ArrivalStatus("fast"), ArrivalStatus("slow", 1.0, stale=True))),  # at 4.0
    ]
    assert times_of_workers(rounds) == {"fast": [1.0, 1.0], "slow": [1.5, 1.5]}


def test_rounds_before_a_step_was_set_say_nothing_of_those_after_it() -> None:
    rounds = [RoundStatus(step, at, at, 1, (ArrivalStatus("a"),)) for step, at in ((1, 1.0), (2, 2.0), (9, 50.0))]
    assert times_of_workers(rounds) == {"a": [1.0]}


@pytest.mark.parametrize(
    ("num_required", "grace", "seconds", "late", "per_second"),
    [
        (3, 0.0, 4.0, 0.0, 0.75),  # all wait for the slow one
        (2, 0.0, 1.0, 1 / 9, 2.0),  # which comes once in four rounds, too late
        (2, 3.0, 4.0, 0.0, 0.75),  # a grace in which it comes
        (2, 0.5, 1.5, 1 / 7, None),  # one too short for it
        (1, 0.0, 1.0, None, None),
    ],
)
def test_two_equal_workers_and_a_slow_one(
    num_required: int, grace: float, seconds: float, late: float | None, per_second: float | None
) -> None:
    found = replay({"a": [1.0], "b": [1.0], "slow": [4.0]}, num_required, grace)
    assert found.seconds == pytest.approx(seconds)
    assert late is None or found.late == pytest.approx(late, abs=0.03)
    assert per_second is None or found.per_second == pytest.approx(per_second)


@given(st.lists(SECONDS, min_size=2, max_size=6), st.data())
def test_more_gradients_take_no_less_time_and_all_of_them_as_long_as_the_slowest(
    times: list[list[float]], data: st.DataObject
) -> None:
    workers = {str(at): each for at, each in enumerate(times)}
    everybody = replay(workers, len(times))
    assert everybody.late == 0.0
    assert everybody.seconds <= max(map(max, times)) * (1 + 1e-9)
    fewer = replay(workers, data.draw(st.integers(1, len(times))))
    assert 0.0 <= fewer.late < 1.0
    assert fewer.seconds >= min(map(min, times)) * (1 - 1e-9)


@given(st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6, unique=True))
def test_recorded_rounds_are_replayed_as_they_were(times: list[float]) -> None:
    """If all gradients count: here, no round waits for a late worker."""
    workers = {str(at): each for at, each in enumerate(times)}
    found = what_if(rounds_of(workers, len(times)))
    assert found is not None
    assert found.as_required.seconds == pytest.approx(found.seconds) == pytest.approx(max(times))
    assert found.num_workers == len(times)
    assert [each.num_required for each in found.alternatives] == sorted(
        {each for each in (len(times) - 1, len(times) - 2, len(times) // 2 + 1) if 1 <= each < len(times)}, reverse=True
    )


def test_parameters_may_have_a_grace() -> None:
    rounds = rounds_of({"a": 1.0, "b": 1.05, "slow": 4.0}, 3)
    without, with_grace = what_if(rounds), what_if(rounds, has_grace=True)
    assert without is not None
    assert with_grace is not None
    assert {each.grace for each in without.alternatives} == {0.0}
    assert [(each.num_required, each.grace) for each in with_grace.alternatives] == [
        (2, pytest.approx(0.4)),
        (2, 0.0),
        (1, pytest.approx(0.4)),
        (1, 0.0),
    ]


@pytest.mark.parametrize(
    ("why", "rounds"),
    [
        ("none", []),
        ("too few", rounds_of({"a": 1.0, "b": 2.0}, 2, number=FEWEST_ROUNDS - 1)),
        ("one worker", rounds_of({"a": 1.0}, 1)),
        ("no ids", rounds_of({"": 1.0}, 1)),
        ("none has ended", [RoundStatus(step, step, 0.0, 2, (ArrivalStatus("a"),)) for step in range(9)]),
    ],
)
def test_nothing_is_said_of_too_little(why: str, rounds: Sequence[RoundStatus]) -> None:
    assert what_if(rounds) is None, why


def test_a_replay_needs_as_many_workers_as_gradients() -> None:
    with pytest.raises(ValueError, match="expected num_required from 1 to 1, the number of workers, got 2"):
        replay({"a": [1.0]}, 2)
