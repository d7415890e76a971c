"""Metrics and evaluations after a crash of the server: all there, once, with the same hashes."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gradserve_server.accumulators.gradient import Contribution, Metrics, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.metrics import Report, canonical
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage.journal import Durability
from tests.parameters.bench import opened, push
from tests.parameters.durable.disk import Disk, ledger_of, shape_of

LEVELS = [Durability.ROUND, Durability.GRADIENT]
ODD = canonical({"loss": math.nan, "low": -math.inf, "ü": -0.0, "": 5e-324})


@pytest.fixture(params=LEVELS, ids=lambda level: level.value)
async def disk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Disk]:
    made = await Disk.open(tmp_path / "state", request.param)
    yield made
    made.close()


def call(sequence: int) -> RequestId:
    return RequestId("a", sequence, b"content")


def metrics(**values: float) -> Metrics:
    return canonical(values)


async def two_rounds(made: Parameters) -> None:
    for step in range(2):
        await push(made, {"w": [1, 1]}, worker_id="a", call=call(step), metrics=metrics(loss=2 - step))
        await push(made, {"w": [1, 1]}, worker_id="b", weight=3.0, metrics=ODD if step else metrics(loss=4))


async def test_metrics_and_hashes_are_the_same_after_a_crash(disk: Disk) -> None:
    made = await disk.parameters(rounds={"num_required": 2})
    await two_rounds(made)
    after = (await disk.after_crash()).found()
    assert repr(shape_of(after)) == repr(shape_of(made))
    assert repr(ledger_of(after)) == repr(ledger_of(made))
    first, second = after.records(0, 9)[0]
    assert first.metrics == {"loss": 3.5}
    assert math.isnan(second.metrics["loss"])
    assert second.chained(first.hash).hash == second.hash


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.value)
async def test_metrics_of_the_open_round_are_as_durable_as_its_updates(level: Durability, tmp_path: Path) -> None:
    disk = await Disk.open(tmp_path / "state", level)
    made = await disk.parameters(rounds={"num_required": 3}, one_per_worker=False)
    await push(made, {"w": [1, 1]}, worker_id="a", call=call(1), metrics=metrics(loss=1))
    summands = Summand(1.0, "b", metrics=metrics(loss=4)), Summand(2.0, "c")
    await made.push(None, Contribution(0, 3.0, sum_of=summands[:1]), opened({"w": [1, 1]}))
    after = (await disk.after_crash()).found()
    if level is Durability.ROUND:
        assert after.ledger.updates == []
        await push(after, {"w": [1, 1]}, 0, worker_id="a", call=call(1), metrics=metrics(loss=1))
        await push(after, {"w": [1, 1]}, 0, metrics=metrics(loss=4))
    again, duplicate = await after.push(
        call(1), Contribution(0, worker_id="a", metrics=metrics(loss=1)), opened({"w": [1, 1]})
    )
    assert (again.outcome, duplicate) == (Outcome.ACCEPTED, True)
    await push(after, {"w": [1, 1]}, worker_id="d", metrics=metrics(loss=7))
    assert [each.metrics for each in after.records(0, 9)[0]] == [{"loss": 4}]
    disk.close()


async def test_evaluations_are_there_after_a_crash_and_count_once(disk: Disk) -> None:
    made = await disk.parameters(rounds={"num_required": 2})
    await made.report(call(7), Report(0, metrics(loss=3), worker_id="e"))
    await two_rounds(made)
    await push(made, {"w": [1, 1]}, worker_id="a")  # not on disk yet with ROUND
    await made.report(call(8), Report(2, ODD, 2.0))
    after = (await disk.after_crash()).found()
    found = after.evaluations(None, 9)[0]
    assert [(each.step, each.weight, list(each.worker_ids), each.num_reports) for each in found] == [
        (0, 1.0, ["e"], 1),
        (2, 2.0, [], 1),
    ]
    assert repr(found[1].metrics) == repr(made.evaluations(0, 1)[0][0].metrics)
    again = await after.report(call(8), Report(2, ODD, 2.0))
    assert (again.outcome, again.is_duplicate, again.evaluation.num_reports) == (Outcome.ACCEPTED, True, 1)
    assert (await after.report(None, Report(0, metrics(loss=9), worker_id="e"))).outcome is Outcome.ALREADY_COUNTED
    with pytest.raises(InvalidArgumentError, match="same content"):
        await after.report(RequestId("a", 8, b"other"), Report(2, ODD, 2.0))


async def test_a_snapshot_has_metrics_and_evaluations(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 4)
    made = await disk.parameters(rounds={"num_required": 2}, keep_rounds=2)
    for step in range(6):
        await push(made, {"w": [1, 1]}, worker_id="a", metrics=metrics(loss=step))
        await made.report(None, Report(step, metrics(loss=step), worker_id="e"))
        await push(made, {"w": [1, 1]}, worker_id="b")
    await disk.shortened()
    assert disk.store.rows("SELECT count(*) FROM parameters_ledger") == [(1,)]
    after = (await disk.after_crash()).found()
    assert repr(ledger_of(after)) == repr(ledger_of(made))
    assert [each.step for each in after.evaluations(None, 9)[0]] == [3, 4, 5]
    assert after.metrics == {"loss": 5}


async def test_a_directory_without_metrics_is_as_earlier_servers_wrote_it(disk: Disk) -> None:
    made = await disk.parameters(keep_rounds=5)
    await push(made, {"w": [1, 1]}, call=call(1))
    texts = [record for (record,) in disk.store.rows("SELECT record FROM parameters_round")]
    texts += [record for (record,) in disk.store.rows("SELECT record FROM parameters_event")]
    assert not any("metrics" in text for text in texts)
    assert [len(json.loads(texts[0])["updates"][0])] == [8]
