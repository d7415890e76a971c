"""Many waits that end together."""

import asyncio
import gc
import tracemalloc

import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.waits import Diagnosis, TakeQueue
from gradserve_server.errors import DeadlineExceededError
from tests.accumulators.bench import ID, Bench, apply, take, turns

NUM_WORKERS = 30_000


def filled_rounds(num_workers: int = NUM_WORKERS) -> Rounds:
    """Returns a round of many workers, after one of as many others."""
    rounds = Rounds()
    for first in (0, num_workers):
        if first:
            rounds.close()
        for worker in range(first, first + num_workers):
            rounds.admit(Contribution(worker_id=f"worker {worker:07}"))
    return rounds


def test_what_a_diagnosis_costs_does_not_grow_with_the_workers() -> None:
    diagnosis = Diagnosis("default/w", filled_rounds(), TakeQueue())
    tracemalloc.start()
    try:
        texts = [diagnosis.text() for _ in range(200)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2 * len(texts[0])
    assert texts[7].startswith("30000 gradients are in (workers: worker 0030000, worker 0030001, ")
    assert " and 29950 more; missing from the previous round: worker 0000000, " in texts[7]
    assert texts[7].endswith(" and 29950 more), global_step is 1, 0 wait")


def test_workers_are_looked_at_once_until_the_round_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    describe = Diagnosis._describe_workers

    def counted(diagnosis: Diagnosis) -> str:
        nonlocal looks
        looks += 1
        return describe(diagnosis)

    monkeypatch.setattr(Diagnosis, "_describe_workers", counted)
    rounds = filled_rounds(10)
    diagnosis = Diagnosis("default/w", rounds, TakeQueue())
    for _ in range(100):
        diagnosis.text()
    assert looks == 1
    rounds.admit(Contribution(worker_id="worker 0000003"))
    assert "missing from the previous round: worker 0000000, worker 0000001, worker 0000002, worker 0000004, " in (
        diagnosis.text()
    )
    rounds.close()
    assert "workers: none named; missing from the previous round: worker 0000010, " in diagnosis.text()
    assert looks == 3


async def test_takes_that_end_together(bench: Bench) -> None:
    acc = bench.accumulator()
    for number in range(1000):
        await apply(acc, 1, worker_id=f"worker {number}")
    takes = [asyncio.create_task(take(acc, 2000, timeout=0.01)) for _ in range(200)]
    errors = await asyncio.gather(*takes, return_exceptions=True)
    for error in errors:
        assert isinstance(error, DeadlineExceededError)
        assert len(error.message) < 2000


async def test_a_remembered_answer_keeps_nothing_of_its_round(bench: Bench) -> None:
    """A client with many calls would keep the members of as many rounds."""
    acc = bench.accumulator()
    await apply(acc, 1, call=ID, worker_id="w")
    for _ in range(5000):
        await apply(acc, 1)
    await take(acc, 1)
    await turns()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Contribution]
    applied, duplicate = await apply(acc, 1, call=ID, worker_id="w")
    assert duplicate
    assert (applied.round.number, applied.round.step) == (0, 1)
