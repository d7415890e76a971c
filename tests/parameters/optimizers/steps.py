"""Steps of components for every optimizer, and what they have to give."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.parameters.optimizers.adagrad import Adagrad, AdagradOptax
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.flower import FlowerAdam, FlowerAvgM, FlowerYogi
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.stepping import ComponentStep
from gradserve_server.parameters.optimizers.yogi import Yogi
from tests.parameters.optimizers.rounds import Array

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(0.1, 0.0, 0.0, 0.0, False),
    "sgd with weight decay": Sgd(0.1, 0.0, 0.0, 0.3, False),
    "momentum": Sgd(0.1, 0.9, 0.2, 0.0, False),
    "nesterov": Sgd(0.7, 0.9, 0.0, 0.1, True),
    "adam": Adam(0.1, 0.9, 0.999, 1e-8, 0.1, False),
    "adam without memory": Adam(0.1, 0.0, 0.0, 1e-8, 0.0, False),
    "adamw": Adam(0.1, 0.9, 0.999, 1e-8, 0.1, True),
    "adagrad": Adagrad(0.1, 0.1, 0.1, 0.5, 1e-10),
    "adagrad_optax": AdagradOptax(0.1, 0.0, 1e-7),
    "yogi": Yogi(0.1, 0.9, 0.999, 1e-3, 1e-6),
    "flower_adam": FlowerAdam(0.1, 0.9, 0.99, 1e-3),
    "flower_yogi": FlowerYogi(0.1, 0.9, 0.99, 1e-3),
    "flower_avg_m": FlowerAvgM(0.5, 0.9),
}

HARD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -1e-7, 65504.0, 1e-41]
MASTERS: list[Any] = [np.float32, np.float64]
PAIRS = [
    (np.float32, np.float32),
    (np.float16, np.float32),
    (ml_dtypes.bfloat16, np.float32),
    (np.float64, np.float64),
    (np.float16, np.float64),
]
"""Dtypes of updates and masters."""


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, *, hard: bool = False) -> Array:
    with np.errstate(all="ignore"):
        values = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 3, shape)).astype(dtype)
        if hard:
            values.reshape(-1)[: len(HARD)] = np.array(HARD).astype(dtype)[: values.size]
    return values


def component(
    optimizer: Optimizer, shape: tuple[int, ...], seed: int, *, update: Any, master: Any, parts: str = "both"
) -> ComponentStep:
    """Makes a step; `parts` says whether there are "both" sum and addend, the "sum" or the "addend" alone."""
    rng = np.random.default_rng(seed)
    return ComponentStep(
        total=array(rng, shape, master, hard=seed % 2 == 0) if parts != "addend" else None,
        addend=array(rng, shape, update, hard=seed % 3 == 0) if parts != "sum" else None,
        factor=[1.0, 0.3, 7.0][seed % 3],
        divisor=[1.0, 3.0, 1e-3][seed // 3 % 3],
        negate=seed % 2 == 1,
        parameter=array(rng, shape, master),
        slots=tuple(np.asarray(np.abs(array(rng, shape, master))) for _ in optimizer.slots),
        result=np.full(shape, 77, master),
        step=1 + seed % 4,
    )


def copied(steps: Sequence[ComponentStep]) -> list[ComponentStep]:
    return [
        replace(step, slots=tuple(slot.copy() for slot in step.slots), result=np.full_like(step.result, 55))
        for step in steps
    ]


def assert_same_bits(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found)[number], np.signbit(expected)[number])


def assert_same_steps(found: Sequence[ComponentStep], expected: Sequence[ComponentStep]) -> None:
    for one, other in zip(found, expected, strict=True):
        for slot, expected_slot in zip(one.slots, other.slots, strict=True):
            assert_same_bits(slot, expected_slot)
        assert_same_bits(one.result, other.result)


def step_by_element(optimizer: Optimizer, lr_factor: float, steps: Sequence[ComponentStep]) -> None:
    """The specification: the gradient that a `Reducer` gives, and the equation on a whole component."""
    reducer = Reducer(ForkJoin(1))
    for step in steps:
        dtype = step.parameter.dtype
        gradient = np.zeros(step.parameter.shape, dtype)
        if step.total is None:
            assert step.addend is not None
            reducer.scale([step.addend], step.factor, [gradient])
            reducer.divide([gradient], step.divisor, [gradient])
        elif step.addend is None:
            reducer.divide([step.total], step.divisor, [gradient])
        else:
            total = step.total.copy()
            reducer.add_and_divide([total], [step.addend], step.factor, step.divisor, [gradient])
        if step.negate:
            gradient = np.asarray(-gradient)
        numbers = [dtype.type(each) for each in optimizer.numbers(step.step, lr_factor)]
        with np.errstate(all="ignore"):
            master, result, *slots = (each.reshape(-1) for each in (step.parameter, step.result, *step.slots))
            optimizer.loop.by_numpy(gradient.reshape(-1), master, slots, result, numbers)
