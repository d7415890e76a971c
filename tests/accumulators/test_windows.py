"""What an accumulator remembers of calls is made of events, whatever has happened."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.ledger import Answer, AnswersReceived, ClientsForgotten, Event, Ledger, Taken
from gradserve_server.accumulators.records import EVENTS
from gradserve_server.errors import ResourceExhaustedError, ServiceError, UnavailableError
from gradserve_server.resources.budget import Budget
from tests.accumulators.bench import Bench, apply, push_pull, take, turns
from tests.journals import ListedJournal

LIMITS: dict[str, Any] = {"id_window": 3, "max_clients": 2, "client_memory_seconds": 10}


@dataclass(frozen=True)
class Call:
    """A call of a client, which goes away if it has to wait."""

    kind: str
    client: str
    sequence: int
    unanswered: frozenset[int] = frozenset()

    async def make(self, acc: Accumulator) -> None:
        call = RequestId(self.client, self.sequence, self.kind.encode(), self.unanswered)
        calls: dict[str, Any] = {
            "apply": lambda: apply(acc, 1, call=call, local_step=acc.state.global_step),
            "stale": lambda: apply(acc, 1, call=call, local_step=acc.state.global_step - 1),
            "take": lambda: take(acc, 2, call),
            "push_pull": lambda: push_pull(acc, 1, num_required=2, call=call, local_step=acc.state.global_step),
        }
        task = asyncio.ensure_future(calls[self.kind]())
        await turns(8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turns()


CALLS = st.builds(
    Call,
    st.sampled_from(["apply", "apply", "stale", "take", "push_pull"]),
    st.sampled_from("abc"),
    st.integers(0, 7),
    st.frozensets(st.integers(0, 7), max_size=3),
)


def contents(ledger: Ledger) -> dict[str, Any]:
    rounds = ledger.rounds
    return {
        "step": rounds.global_step,
        "round": (rounds.current.number, rounds.members),
        "missing": list(rounds.missing_workers),
        "awaiting": ledger.awaiting,
        "windows": {
            client: (
                window.floor,
                [(number, call.fingerprint, told(call.record)) for number, call in window.calls.items()],
            )
            for client, window in ledger.calls.windows().items()
        },
    }


def told(answer: Answer) -> tuple[Any, ...]:
    ended = None if answer.round is None else (answer.round.number, answer.round.step)
    return ("taken", ended) if isinstance(answer, Taken) else (answer.outcome, ended, answer.num_accumulated)


def replayed(events: list[Event]) -> Ledger:
    calls: CallMemory[Answer] = CallMemory(
        window=3, max_clients=2, silence=10, clock=lambda: 0.0, bookkeeping=Budget(1 << 40, "bytes").reserve()
    )
    ledger = Ledger(calls)
    for event in events:
        ledger.replay(EVENTS.event(json.loads(json.dumps(EVENTS.record(event)))))
    return ledger


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(CALLS, CALLS, st.integers(1, 8)), max_size=30))
def test_the_same_events_make_the_same_windows(history: list[Call | int]) -> None:
    """Calls of few clients with few numbers, and silence between them."""

    async def check() -> None:
        journal: ListedJournal[Event] = ListedJournal()
        bench = Bench(journal=journal, **LIMITS)
        acc = bench.accumulator()
        for each in history:
            if isinstance(each, int):
                bench.now += each
            else:
                await each.make(acc)
            assert contents(replayed(journal.events)) == contents(acc._ledger)

    asyncio.run(check())


async def test_what_is_forgotten_is_an_event() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    bench = Bench(journal=journal, **LIMITS)
    acc = bench.accumulator()
    await Call("push_pull", "a", 1).make(acc)
    await Call("apply", "a", 2, frozenset({1})).make(acc)
    await Call("take", "b", 1).make(acc)
    assert not [event for event in journal.events if isinstance(event, AnswersReceived | ClientsForgotten)]
    await Call("push_pull", "a", 3).make(acc)
    await Call("stale", "a", 4).make(acc)
    assert AnswersReceived("a", (3,)) in journal.events
    bench.now += 5
    await Call("apply", "b", 2).make(acc)
    bench.now += 5
    await Call("apply", "c", 1).make(acc)
    assert ClientsForgotten(("a",)) in journal.events
    assert set(acc._ledger.calls.windows()) == {"b", "c"}


async def test_what_the_journal_refuses_is_not_forgotten() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    bench = Bench(journal=journal, **LIMITS)
    acc = bench.accumulator()
    await Call("push_pull", "a", 1).make(acc)
    await Call("apply", "b", 1).make(acc)
    bench.now += 10
    before = contents(acc._ledger)
    journal.failure = UnavailableError("the disk is full")
    for call in (RequestId("a", 2), RequestId("c", 1)):
        with pytest.raises(UnavailableError, match="the disk is full"):
            await take(acc, 1, call)
    assert contents(acc._ledger) == before
    assert bench.registry.factory.waiters.used == 0


async def test_one_that_waits_for_the_journal_can_be_cancelled_and_joined() -> None:
    journal: ListedJournal[Event] = ListedJournal()
    bench = Bench(journal=journal, **LIMITS)
    acc = bench.accumulator()
    await Call("push_pull", "a", 1).make(acc)
    before = contents(acc._ledger)
    calls = [asyncio.ensure_future(apply(acc, 1, call=RequestId("a", 2))) for _ in range(3)]
    await journal.hold()
    calls[0].cancel()
    await turns()
    assert contents(acc._ledger) == before
    journal.go_on.set()
    _, first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert {first[1], second[1]} == {False, True}, "one is the duplicate of the other"  # type: ignore[index]
    assert acc.num_accumulated == 2
    assert contents(replayed(journal.events)) == contents(acc._ledger)


async def test_a_refused_call_makes_nothing_be_forgotten() -> None:
    bench = Bench(**LIMITS)
    acc = bench.accumulator()
    await Call("push_pull", "a", 5).make(acc)
    await Call("apply", "a", 1).make(acc)
    await Call("push_pull", "a", 2).make(acc)
    before = contents(acc._ledger)
    with pytest.raises(ServiceError, match="expected the same content"):
        await apply(acc, 1, call=RequestId("a", 5, b"another"))
    assert contents(acc._ledger) == before
    await Call("apply", "b", 1).make(acc)
    with pytest.raises(ResourceExhaustedError, match="too many clients"):
        await apply(acc, 1, call=RequestId("c", 1))
    assert set(acc._ledger.calls.windows()) == {"a", "b"}


async def test_takers_are_served_though_the_call_that_was_heard_of_is_gone() -> None:
    """Who takes while something is being forgotten leaves it to that to look after the queue."""
    journal: ListedJournal[Event] = ListedJournal()
    acc = Bench(journal=journal, **LIMITS).accumulator()
    await Call("push_pull", "a", 1).make(acc)
    late = asyncio.ensure_future(take(acc, 5, RequestId("a", 2)))
    await journal.hold()
    taking = asyncio.ensure_future(take(acc, 1, timeout=5))
    await turns()
    late.cancel()
    journal.go_on.set()
    assert (await taking)[0].num_gradients == 1
