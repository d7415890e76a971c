"""Updates that can be told apart in a version and in the record of its round, and specs of parameters for them."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradserve_server.accumulators.gradient import Array, Gradient
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape
from gradserve_server.parameters.optimizers.adagrad import Adagrad
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule, ScheduleKind
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.yogi import Yogi
from gradserve_server.parameters.reductions.spec import Krum, Mean, Median, Reduction, Sum
from gradserve_server.parameters.round_rules import (
    ConstantDiscount,
    ExponentialDiscount,
    PolynomialDiscount,
    RoundRules,
    Staleness,
)
from gradserve_server.parameters.spec import Normalization, ParametersSpec, Rules, UpdateKind
from gradserve_server.storage.journal import Durability
from tests.simulation.accumulators.gradients import MOST, noise

_WEIGHTS = 1024
"""The weight of update n is 1 + n / 1024, by which a record names it."""


def weight_of(number: int) -> float:
    """Returns the weight of an update."""
    return 1 + number / _WEIGHTS


def number_of(weight: float) -> int:
    """Returns the number of the update with a weight; -1 if there is none."""
    number = (weight - 1) * _WEIGHTS
    return int(number) if number == int(number) and 0 <= number < MOST else -1


def values_of(number: int, spec: ParametersSpec) -> dict[str, Array]:
    """Returns the values of an update, which has a 1 where no other one has, and not always all components."""
    who = np.zeros(MOST, np.float32)
    who[number] = 1
    values: dict[str, Array] = {"who": who}
    if number % 5 or spec.reduction.needs_all_components:
        values["noise"] = noise(number).astype(spec.by_name["noise"].dtype)
    if spec.reduction.needs_all_components:
        values["mark"] = np.zeros(1)
    return values


def update_of(number: int, spec: ParametersSpec, *, is_given_away: bool) -> Gradient:
    """Returns an update, whose memory may be taken over if it is given away."""
    return Gradient(values_of(number, spec), owned=is_given_away)


def marked(mark: int, dtype: Any) -> dict[str, Array]:
    """Returns the first values of parameters, which no other creation has."""
    return {
        "who": np.zeros(MOST, np.float32),
        "noise": noise(MOST + mark).astype(dtype),
        "mark": np.array([mark], np.float64),
    }


def mark_of(values: Mapping[str, Any]) -> int:
    """Returns the number of the creation or load from which a version comes."""
    return int(values["mark"][0])


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[int]:
    """Returns the updates that a version shows and the version before does not, for an optimizer without a memory."""
    difference: NDArray[Any] = after["who"] - before["who"]
    return set(np.flatnonzero(difference).tolist())


OPTIMIZERS: Sequence[Optimizer] = (
    Sgd(1.0, 0.0, dampening=0.0, weight_decay=0.0, nesterov=False),
    Sgd(1.0, 0.0, dampening=0.0, weight_decay=0.0, nesterov=False),
    Sgd(0.5, 0.9, dampening=0.0, weight_decay=0.0, nesterov=False),
    Sgd(0.5, 0.5, dampening=0.0, weight_decay=0.125, nesterov=True),
    Adam(0.125, 0.9, 0.999, 1e-8, weight_decay=0.0, decoupled=False),
    Adagrad(0.5, 0.0, 0.0, 0.0, 1e-10),
    Yogi(0.125, 0.9, 0.999, 1e-3, 1e-6),
)
SCHEDULES = (Schedule(), Schedule(), Schedule(ScheduleKind.LINEAR, warmup=2, rounds=8, end=0.25))
REDUCTIONS: Sequence[Reduction] = (Mean(),) * 6 + (Sum(), Median(), Krum(0), Krum(0, report_only=True))
STALENESS = (
    Staleness(),
    Staleness(1, ConstantDiscount()),
    Staleness(2, ExponentialDiscount(0.5)),
    Staleness(3, PolynomialDiscount(1.0)),
)


def rules_of(chance: random.Random, number: int, least: int = 1) -> RoundRules:
    """Returns rules for the end of a round that no other number has, with at least so many updates in each round."""
    num_required = chance.randint(least, 3)
    grace: float | Literal["adaptive"] = chance.choice([0.0, 0.0, 0.3, 2.0, "adaptive"])
    expected: int | Literal["alive"] | None = None
    if grace:
        expected = chance.choice([None, None, num_required + 1, "alive"])
    deadline = chance.choice([None, None, 2.5, 4.0])
    min_required = None
    if deadline is not None and chance.random() < 0.5:
        min_required = chance.randint(least, num_required)
    interval = chance.choice([0.0, 0.0, 0.0, 1.5]) + number * 1e-6
    more: dict[str, Any] = {"max_grace": 2.0} if grace == "adaptive" else {}
    return RoundRules(num_required, min_required, expected, grace, min_interval=interval, deadline=deadline, **more)


def least_of(reduction: Reduction) -> int:
    """Returns the number of updates that each round needs for a reduction."""
    return reduction.num_needed if isinstance(reduction, Krum) else 1


def spec_of(chance: random.Random, number: int) -> ParametersSpec:
    """Returns a spec whose rules no other number has."""
    reduction = chance.choice(REDUCTIONS)
    is_mean = isinstance(reduction, Mean)
    clip_norm = 16.0 if is_mean and chance.random() < 0.15 else None
    noise_dtype = np.dtype(np.float16 if chance.random() < 0.25 else np.float32)
    components = (
        ComponentSpec("who", np.dtype(np.float32), PartialShape((MOST,))),
        ComponentSpec("noise", noise_dtype, PartialShape(noise(0).shape)),
        ComponentSpec("mark", np.dtype(np.float64), PartialShape((1,))),
    )
    rules = Rules(chance.choice(OPTIMIZERS), rules_of(chance, number, least_of(reduction)), chance.choice(SCHEDULES))
    return ParametersSpec(
        components,
        rules,
        update=chance.choice([UpdateKind.DELTA, UpdateKind.DELTA, UpdateKind.GRADIENT]),
        staleness=chance.choice(STALENESS),
        normalization=Normalization.COUNT if is_mean and chance.random() < 0.15 else Normalization.WEIGHTS,
        reduction=reduction,
        clip_norm=clip_norm,
        keep_versions=chance.randint(1, 3),
        deterministic=chance.random() < 0.3,
        refuse_non_finite=clip_norm is not None or chance.random() < 0.5,
        one_per_worker=chance.random() < 0.8,
        durability=chance.choice([Durability.ROUND, Durability.GRADIENT]),
        agreement={"run": "simulated"},
        keep_rounds=chance.choice([3, 1000]),
    )
