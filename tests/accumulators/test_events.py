"""Every change of an accumulator goes through one event, which a journal learns of before it takes effect."""

import asyncio
import json

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import (
    AnswersReceived,
    ClientsForgotten,
    Event,
    GradientAnswered,
    RoundEnded,
    StepSet,
)
from gradserve_server.accumulators.records import EVENTS
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import UnavailableError
from tests.accumulators.bench import ID, Bench, apply, push_pull, take, turns, value_of
from tests.journals import ListedJournal

EXAMPLES: list[Event] = [
    GradientAnswered(None, Contribution(), Outcome.STALE),
    GradientAnswered(ID, Contribution(-(1 << 62), 0.1, "w\x00ü", 3), Outcome.ACCEPTED, awaits_average=True),
    GradientAnswered(RequestId("b", 1, b"\xff\x00"), Contribution(weight=5e-324), Outcome.ALREADY_COUNTED),
    RoundEnded(),
    RoundEnded(ID),
    StepSet((1 << 63) - 1),
    StepSet(-1, (2, 3), drops_round=True),
    AnswersReceived("ü", (1, (1 << 63) - 1)),
    ClientsForgotten(("a", "b")),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=repr)
def test_events_can_be_written_down(event: Event) -> None:
    assert EVENTS.event(json.loads(json.dumps(EVENTS.record(event)))) == event


def test_unknown_events_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a known event, got 'else'"):
        EVENTS.event({"event": "else"})


async def test_each_change_is_one_event() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    acc = Bench(journal=journal).accumulator()
    await acc.set_global_step(3)
    await apply(acc, 1, local_step=2, call=RequestId("a", 1))
    await apply(acc, 1, local_step=3, worker_id="w")
    await take(acc, 1, RequestId("a", 2))
    await push_pull(acc, 5, num_required=1, local_step=4, worker_id="w")
    await apply(acc, 1, local_step=5)
    await acc.set_global_step(7, drop_gradients=True)
    await acc.set_global_step(8, drop_gradients=True)
    assert journal.events == [
        StepSet(3),
        GradientAnswered(RequestId("a", 1), Contribution(2), Outcome.STALE),
        GradientAnswered(None, Contribution(3, worker_id="w"), Outcome.ACCEPTED),
        RoundEnded(RequestId("a", 2)),
        GradientAnswered(None, Contribution(4, worker_id="w"), Outcome.ACCEPTED, awaits_average=True),
        RoundEnded(),
        GradientAnswered(None, Contribution(5), Outcome.ACCEPTED),
        StepSet(7, drops_round=True),
        StepSet(8),
    ]


async def test_nothing_shows_before_the_journal_has_it() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    acc = Bench(journal=journal).accumulator()
    before = acc.state
    journal.go_on.clear()
    applying = asyncio.create_task(apply(acc, 7))
    await turns()
    assert (acc.state.num_accumulated, acc.state.global_step) == (0, 0)
    journal.go_on.set()
    await applying
    assert before.num_accumulated < acc.state.num_accumulated
    journal.go_on.clear()
    taking = asyncio.create_task(take(acc, 1))
    await turns()
    assert (acc.state.num_accumulated, acc.state.global_step, acc.state.kept_steps) == (1, 0, ())
    journal.go_on.set()
    assert value_of((await taking)[0]) == [7]


async def test_what_the_journal_refuses_has_not_happened() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    bench = Bench(journal=journal)
    acc = bench.accumulator()
    await apply(acc, 1)
    before, used = acc.state, bench.memory.used
    journal.failure = UnavailableError("the disk is full")
    calls = [
        apply(acc, 2, call=RequestId("a", 1)),
        apply(acc, 2, local_step=-1),
        take(acc, 1, RequestId("a", 2)),
        acc.set_global_step(9),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="the disk is full"):
            await call
    assert (acc.state, bench.memory.used) == (before, used)
    journal.failure = None
    assert not (await apply(acc, 3, call=RequestId("a", 1)))[1], "nothing is remembered of the call that failed"
    np.testing.assert_array_equal(value_of((await take(acc, 1, RequestId("a", 2)))[0]), [2])
