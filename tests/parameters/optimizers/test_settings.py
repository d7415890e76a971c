"""Settings of optimizers and schedules: ranges, records, slots and numbers."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.optimizers import OPTIMIZERS, name_of, optimizer_of, optimizer_record
from gradserve_server.parameters.optimizers.adagrad import Adagrad, AdagradOptax
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.flower import FlowerAdagrad, FlowerAdam, FlowerAvgM, FlowerYogi
from gradserve_server.parameters.optimizers.optimizer import (
    Optimizer,
    Schedule,
    ScheduleKind,
    power,
    schedule_of,
    schedule_record,
)
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.yogi import Yogi
from tests.together import together

ADAM = Adam(1e-3, 0.9, 0.999, 1e-8, 0.0, False)
SGD = Sgd(0.1, 0.9, 0.0, 0.0, False)
ALL: list[Optimizer] = [
    SGD,
    ADAM,
    Adagrad(0.01, 0.0, 0.0, 0.0, 1e-10),
    Yogi(0.01, 0.9, 0.999, 1e-3, 1e-6),
    FlowerAdam(0.1, 0.9, 0.99, 1e-3),
    FlowerYogi(0.01, 0.9, 0.99, 1e-3),
    FlowerAdagrad(0.1, 1e-3),
    FlowerAvgM(1.0, 0.9),
    AdagradOptax(0.1, 0.1, 1e-7),
]


@together("optimizer", ALL)
def test_records(optimizer: Optimizer) -> None:
    record = json.loads(json.dumps(optimizer_record(optimizer)))
    assert optimizer_of(record) == optimizer
    assert record["kind"] == name_of(optimizer)
    assert OPTIMIZERS[record["kind"]] is type(optimizer)


def test_every_optimizer_has_a_case_here() -> None:
    assert {type(each) for each in ALL} == set(OPTIMIZERS.values())


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({}, KeyError),
        ({"kind": "lion", "lr": 0.1}, KeyError),
        ({"kind": "flower_adagrad", "eta": 0.1}, TypeError),
        ({"kind": "flower_adagrad", "eta": 0.1, "tau": 0.1, "rho": 1.0}, TypeError),
        ({"kind": "flower_adagrad", "eta": "much", "tau": 0.1}, InvalidArgumentError),
    ],
)
def test_what_is_no_record(record: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        optimizer_of(record)


BAD_SETTINGS: list[tuple[Optimizer, str, Any, str]] = [
    (SGD, "lr", -0.1, "a number from 0 to 3.4e+38 for lr, got -0.1"),
    (SGD, "lr", math.nan, "a finite number for lr, got nan"),
    (SGD, "lr", math.inf, "a finite number for lr, got inf"),
    (SGD, "lr", 1e39, "a number from 0 to 3.4e+38 for lr, got 1e+39"),
    (SGD, "lr", True, "a finite number for lr, got True"),
    (SGD, "lr", "0.1", "a finite number for lr, got '0.1'"),
    (SGD, "lr", None, "a finite number for lr, got None"),
    (SGD, "momentum", -0.5, "a number from 0 to 3.4e+38 for momentum, got -0.5"),
    (SGD, "dampening", -0.5, "dampening, got -0.5"),
    (SGD, "weight_decay", -0.5, "weight_decay, got -0.5"),
    (SGD, "nesterov", 1, "True or False, got 1"),
    (replace(SGD, momentum=0.0), "nesterov", True, "a momentum with nesterov, got momentum 0"),
    (replace(SGD, dampening=0.5), "nesterov", True, "dampening 0 with nesterov, got 0.5"),
    (ADAM, "beta1", 1.0, "a number of at least 0 and less than 1 for beta1, got 1.0"),
    (ADAM, "beta2", -0.1, "a number of at least 0 and less than 1 for beta2, got -0.1"),
    (ADAM, "beta2", math.nan, "a number of at least 0 and less than 1 for beta2, got nan"),
    (ADAM, "eps", -1e-8, "eps, got -1e-08"),
    (ADAM, "decoupled", None, "True or False, got None"),
    *[
        (each, name, bad, name)
        for each in ALL
        for name, value in vars(each).items()
        if not isinstance(value, bool)
        for bad in (-1e-9, math.inf)
    ],
]


@together("optimizer, name, value, message", *zip(*BAD_SETTINGS, strict=True))
def test_bad_settings(optimizer: Optimizer, name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        replace(optimizer, **{name: value})
    assert caught.value.field == f"optimizer.{name}"
    assert f"expected {message}" in caught.value.message or message in caught.value.message


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (replace(SGD, momentum=0.0), []),
        (SGD, [("momentum_buffer", 0.0)]),
        (ADAM, [("exp_avg", 0.0), ("exp_avg_sq", 0.0)]),
        (Adagrad(0.01, 0.0, 0.0, 0.3, 1e-10), [("sum", 0.3)]),
        (AdagradOptax(0.1, 0.1, 1e-7), [("sum", 0.1)]),
        (Yogi(0.01, 0.9, 0.999, 1e-3, 1e-6), [("exp_avg", 1e-6), ("exp_avg_sq", 1e-6)]),
        (FlowerAdam(0.1, 0.9, 0.99, 1e-3), [("exp_avg", 0.0), ("exp_avg_sq", 0.0)]),
        (FlowerYogi(0.1, 0.9, 0.99, 1e-3), [("exp_avg", 0.0), ("exp_avg_sq", 0.0)]),
        (FlowerAdagrad(0.1, 1e-3), [("sum", 0.0)]),
        (FlowerAvgM(1.0, 0.9), [("momentum_buffer", 0.0)]),
        (FlowerAvgM(1.0, 0.0), []),
    ],
)
def test_slots(optimizer: Optimizer, slots: list[tuple[str, float]]) -> None:
    assert [(slot.name, slot.initial_value) for slot in optimizer.slots] == slots


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        (SGD, replace(SGD, lr=0.2, momentum=0.5), True),
        (SGD, replace(SGD, momentum=0.0), False),
        (replace(SGD, momentum=0.0), SGD, False),
        (ADAM, replace(ADAM, decoupled=True, weight_decay=0.1), True),
        (ADAM, FlowerAdam(0.1, 0.9, 0.99, 1e-3), False),
        (SGD, FlowerAvgM(1.0, 0.9), False),
        (Adagrad(0.01, 0.0, 0.0, 0.3, 1e-10), Adagrad(0.01, 0.0, 0.0, 0.7, 1e-10), True),
    ],
)
def test_which_settings_keep_the_state(before: Optimizer, after: Optimizer, keeps: bool) -> None:
    assert after.keeps_state_of(before) is keeps


@together("optimizer", ALL)
def test_the_learning_rate_is_multiplied_with_the_factor(optimizer: Optimizer) -> None:
    """So a schedule is the same as another rate in each round."""
    (name,) = {"lr", "eta", "server_learning_rate"} & vars(optimizer).keys()
    assert optimizer.learning_rate == getattr(optimizer, name)
    halved = replace(optimizer, **{name: optimizer.learning_rate / 2})
    for step in (1, 2, 77):
        assert optimizer.numbers(step, 0.5) == halved.numbers(step, 1.0)


@together("base, exponent", [0.0, 0.9, 0.999, 0.9999999, 1.0], [1, 100, 10_000, 1_000_000, 7])
def test_powers(base: float, exponent: int) -> None:
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=0)


def test_corrections_end_after_many_rounds() -> None:
    assert ADAM.numbers(10**15, 1.0) == ADAM.numbers(10**16, 1.0)


SCHEDULES: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Schedule(), lambda n: 1.0),
    "warm-up": (Schedule(warmup=4), lambda n: min(1.0, (n + 1) / 5)),
    "linear": (
        Schedule(ScheduleKind.LINEAR, rounds=10, end=0.2),
        lambda n: 1 - 0.8 * min(n, 10) / 10,
    ),
    "linear, rising": (Schedule(ScheduleKind.LINEAR, rounds=3, end=4.0), lambda n: 1 + min(n, 3)),
    "cosine": (
        Schedule(ScheduleKind.COSINE, rounds=37, end=0.0),
        lambda n: (1 + math.cos(math.pi * min(n, 37) / 37)) / 2,
    ),
    "cosine after warm-up": (
        Schedule(ScheduleKind.COSINE, warmup=5, rounds=37, end=0.1),
        lambda n: (n + 1) / 6 if n < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * min(n - 5, 37) / 37)) / 2,
    ),
    "one round": (Schedule(ScheduleKind.COSINE, rounds=1, end=0.5), lambda n: 1.0 if n == 0 else 0.5),
    "very many rounds": (
        Schedule(ScheduleKind.COSINE, rounds=(1 << 63) - 1, end=0.5),
        lambda n: 0.75 + 0.25 * math.cos(math.pi * n / ((1 << 63) - 1)),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors(name: str) -> None:
    schedule, expected = SCHEDULES[name]
    for num_applied in (*range(60), 10_000, 1 << 62):
        assert schedule.factor(num_applied) == pytest.approx(expected(num_applied), rel=1e-15, abs=3e-16)


def test_a_cosine_is_exact_at_its_middle_and_its_end() -> None:
    schedule = Schedule(ScheduleKind.COSINE, rounds=100, end=0.0)
    assert [schedule.factor(n) for n in (0, 50, 100)] == [1.0, 0.5, 0.0]


def test_bits_of_a_cosine() -> None:
    """The same on every machine: the C library's cosines may differ in their last bits."""
    schedule = Schedule(ScheduleKind.COSINE, rounds=9, end=0.0)
    assert [schedule.factor(n).hex() for n in (1, 2, 3, 4)] == [
        "0x1.f08fb2129168ep-1",
        "0x1.c41b7d167a81dp-1",
        "0x1.8000000000000p-1",
        "0x1.2c7434fc16e71p-1",
    ]


@together("name", SCHEDULES)
def test_records_of_schedules(name: str) -> None:
    schedule, _ = SCHEDULES[name]
    assert schedule_of(json.loads(json.dumps(schedule_record(schedule)))) == schedule


BAD_SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"warmup": -1}, "warmup"),
    ({"warmup": 1.5}, "warmup"),
    ({"warmup": 1 << 63}, "warmup"),
    ({"kind": ScheduleKind.LINEAR, "rounds": 0}, "rounds"),
    ({"kind": ScheduleKind.COSINE, "rounds": -3}, "rounds"),
    ({"kind": ScheduleKind.COSINE, "rounds": True}, "rounds"),
    ({"kind": ScheduleKind.COSINE, "rounds": 3, "end": -0.1}, "end"),
    ({"kind": ScheduleKind.LINEAR, "rounds": 3, "end": math.nan}, "end"),
    ({"kind": ScheduleKind.LINEAR, "rounds": 3, "end": math.inf}, "end"),
    ({"kind": ScheduleKind.LINEAR, "rounds": 3, "end": "0"}, "end"),
    ({"rounds": 3}, ""),
    ({"end": 0.5}, ""),
]


@together("values, name", *zip(*BAD_SCHEDULES, strict=True))
def test_bad_schedules(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected") as caught:
        Schedule(**values)
    assert caught.value.field == f"schedule.{name}".rstrip(".")
