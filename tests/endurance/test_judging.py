"""The long programs judge rightly, and draw what they measured."""

import xml.etree.ElementTree as ET

import pytest

from gradserve import optim
from gradserve.parameter_records import RoundRecord, RoundUpdate, WeightLedger
from tests.endurance import chaos, soak, storm
from tests.endurance.chaos import Entry
from tests.endurance.picture import Series, draw, rates
from tests.endurance.soak import Sample

STEPS = [Entry(0.1 * step, step, "same") for step in range(200)]
ALL = (True, True, True)


@pytest.mark.parametrize(
    ("logs", "reached"),
    [
        ([STEPS, STEPS], ALL),
        ([STEPS, [Entry(5.0, 50, "other")]], (True, True, False)),
        ([[each for each in STEPS if not 15 < each.time < 16.2]], (False, False, True)),
        ([[each for each in STEPS if each.time < 10 or each.step % 2]], (True, False, True)),
    ],
    ids=["quiet", "another average", "a pause", "half as fast"],
)
def test_chaos_is_judged(logs: list[list[Entry]], reached: tuple[bool, ...]) -> None:
    result = chaos.judged(logs, [(15.0, "kill_worker"), (18.0, "cut_network")], 0.0, 10.0, 20.0)
    verdicts = result["reached"]
    assert isinstance(verdicts, dict)
    assert tuple(verdicts.values()) == reached


@pytest.mark.parametrize(
    ("growth", "reached"),
    [
        ((0, 0, 0), ALL),
        ((10, 0, 0), (False, True, True)),
        ((0, 1, 0), (True, False, True)),
        ((0, 0, 1), (True, True, False)),
    ],
    ids=["flat", "memory", "descriptors", "p99"],
)
def test_a_soak_is_judged(growth: tuple[int, int, int], reached: tuple[bool, ...]) -> None:
    samples = [Sample(75.0 + i, 100 + growth[0] * i, 20 + growth[1] * i, 1.0 + growth[2] * i, 100) for i in range(60)]
    assert tuple(soak.judged(samples).values()) == reached


def rounds(count: int, *, every: float = 0.5, workers: int = 4) -> list[RoundRecord]:
    updates = tuple(RoundUpdate(str(each), 100.0, 100.0, 0, None, None, 8, False) for each in range(workers))
    return [
        RoundRecord(step, "expected", every * step, updates, (), f"{step - 1}", f"{step}", 1.0, optim.SGD(1.0), "")
        for step in range(1, count)
    ]


WHOLE = WeightLedger(accepted=400.0, applied=300.0, pending=100.0, refused={})


@pytest.mark.parametrize(
    ("records", "weights", "entries", "reached"),
    [
        (rounds(40), WHOLE, [Entry(5.0, 10, "10")], (True, True, True, True, True, True)),
        (rounds(40), WHOLE, [Entry(5.0, 10, "11")], (True, True, True, True, True, False)),
        (rounds(40), WeightLedger(400.0, 300.0, 0.0, {}), [], (True, True, True, True, False, True)),
        (rounds(20) + rounds(40, workers=3)[20:], WHOLE, [], (False, False, True, True, True, True)),
        (
            [each for each in rounds(40) if not 12 < each.end_time < 18],
            WHOLE,
            [],
            (False, True, False, False, True, True),
        ),
    ],
    ids=["quiet", "another version", "something lost", "three workers", "a pause"],
)
def test_a_storm_is_judged(
    records: list[RoundRecord], weights: WeightLedger, entries: list[Entry], reached: tuple[bool, ...]
) -> None:
    marks = [storm.Mark(12.0, "worker"), storm.Mark(12.5, "server")]
    verdicts = storm.judged(storm.Observed(records, weights, entries, marks, 0.0, 10.0, 20.0))["reached"]
    assert isinstance(verdicts, dict)
    assert tuple(verdicts.values()) == reached


def test_pictures() -> None:
    assert rates([0.1, 0.2, 1.5], 1.0) == [(0.0, 2.0), (1.0, 1.0)]
    picture = draw("A & B", [Series("steps", [(0.0, 1.0), (2.0, 3.0)])], [(1.0, "kill_worker")])
    assert len(ET.fromstring(picture).findall("{http://www.w3.org/2000/svg}line")) == 2
