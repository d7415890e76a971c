"""100 rounds against PyTorch, Optax and Flower: weights, schedules, and components that are absent from rounds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.parameters.optimizers import optimizer_of
from gradserve_server.parameters.optimizers.adagrad import Adagrad, AdagradOptax
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule, ScheduleKind
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.stepping import ComponentStep, Stepper
from gradserve_server.parameters.optimizers.yogi import Yogi
from tests.parameters.optimizers.rounds import (
    SHAPES,
    Array,
    Round,
    Variables,
    assert_close,
    initial_values,
    make_rounds,
)

NUM_ROUNDS = 100
TOLERANCES = {np.float64: 1e-12, np.float32: 1e-6}
SCHEDULES = {
    "constant": Schedule(),
    "warm-up and cosine": Schedule(ScheduleKind.COSINE, warmup=10, rounds=70, end=0.1),
    "linear": Schedule(ScheduleKind.LINEAR, rounds=120, end=0.0),
}

Expected = Iterator[dict[str, Any]]

PYTORCH: dict[str, tuple[Optimizer, Callable[[Any, Any], Any]]] = {
    "sgd": (Sgd(0.1, 0.0, 0.0, 0.0, False), lambda torch, p: torch.optim.SGD(p, 0.1)),
    "sgd with weight decay": (
        Sgd(0.1, 0.0, 0.0, 0.03, False),
        lambda torch, p: torch.optim.SGD(p, 0.1, weight_decay=0.03),
    ),
    "momentum": (Sgd(0.05, 0.9, 0.0, 0.0, False), lambda torch, p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "momentum with dampening": (
        Sgd(0.05, 0.9, 0.4, 0.01, False),
        lambda torch, p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.4, weight_decay=0.01),
    ),
    "nesterov": (
        Sgd(0.7, 0.9, 0.0, 0.001, True),
        lambda torch, p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True, weight_decay=0.001),
    ),
    "adam": (Adam(1e-2, 0.9, 0.999, 1e-8, 0.0, False), lambda torch, p: torch.optim.Adam(p, 1e-2)),
    "adam, other settings": (
        Adam(1e-2, 0.3, 0.9, 1e-3, 0.1, False),
        lambda torch, p: torch.optim.Adam(p, 1e-2, betas=(0.3, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "adam without memory": (
        Adam(1e-2, 0.0, 0.0, 1e-2, 0.0, False),
        lambda torch, p: torch.optim.Adam(p, 1e-2, betas=(0.0, 0.0), eps=1e-2),
    ),
    "adamw": (
        Adam(1e-2, 0.9, 0.999, 1e-8, 0.5, True),
        lambda torch, p: torch.optim.AdamW(p, 1e-2, weight_decay=0.5),
    ),
    "adagrad": (Adagrad(1e-2, 0.0, 0.0, 0.0, 1e-10), lambda torch, p: torch.optim.Adagrad(p, 1e-2)),
    "adagrad, other settings": (
        Adagrad(0.3, 0.05, 0.02, 0.7, 1e-3),
        lambda torch, p: torch.optim.Adagrad(
            p, 0.3, lr_decay=0.05, weight_decay=0.02, initial_accumulator_value=0.7, eps=1e-3
        ),
    ),
}


def by_pytorch(make: Callable[[Any, Any], Any], dtype: Any, schedule: Schedule, rounds: list[Round]) -> Expected:
    torch = pytest.importorskip("torch", reason="not installed: make install-frameworks")
    parameters = {name: torch.tensor(value.astype(dtype)) for name, value in initial_values().items()}
    optimizer = make(torch, list(parameters.values()))
    (group,) = optimizer.param_groups
    lr = group["lr"]
    for num_applied, round_ in enumerate(rounds):
        group["lr"] = lr * schedule.factor(num_applied)
        for name, parameter in parameters.items():
            parameter.grad = None
            if name in round_.updates:
                parameter.grad = torch.tensor(np.asarray(round_.mean(name).astype(dtype)))
        optimizer.step()
        yield parameters


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PYTORCH)
def test_pytorch(compiled: Stepper, name: str, schedule: str, dtype: Any) -> None:
    optimizer, make = PYTORCH[name]
    variables = Variables(optimizer, dtype, compiled, SCHEDULES[schedule])
    rounds = make_rounds(NUM_ROUNDS)
    for round_, expected in zip(rounds, by_pytorch(make, dtype, SCHEDULES[schedule], rounds), strict=True):
        variables.apply(round_)
        assert_close(variables, {name: value.numpy() for name, value in expected.items()}, TOLERANCES[dtype])


OPTAX: dict[str, tuple[Optimizer, Callable[[Any], Any]]] = {
    "yogi": (Yogi(1e-2, 0.9, 0.999, 1e-3, 1e-6), lambda optax: optax.yogi(1e-2)),
    "yogi, other settings": (
        Yogi(0.05, 0.5, 0.9, 0.1, 0.3),
        lambda optax: optax.chain(
            optax.scale_by_yogi(b1=0.5, b2=0.9, eps=0.1, initial_accumulator_value=0.3),
            optax.scale_by_learning_rate(0.05),
        ),
    ),
    "adagrad": (AdagradOptax(0.1, 0.1, 1e-7), lambda optax: optax.adagrad(0.1)),
    "adagrad from 0": (
        AdagradOptax(0.02, 0.0, 1e-3),
        lambda optax: optax.adagrad(0.02, initial_accumulator_value=0.0, eps=1e-3),
    ),
    "adam": (Adam(1e-2, 0.9, 0.999, 1e-8, 0.0, False), lambda optax: optax.adam(1e-2)),
    "adamw": (
        Adam(1e-2, 0.9, 0.99, 1e-8, 0.2, True),
        lambda optax: optax.adamw(1e-2, b2=0.99, weight_decay=0.2),
    ),
    "nesterov": (
        Sgd(0.1, 0.9, 0.0, 0.0, True),
        lambda optax: optax.sgd(0.1, momentum=0.9, nesterov=True),
    ),
}


def by_optax(make: Callable[[Any], Any], schedule: Schedule, rounds: list[Round]) -> Expected:
    """Computes in float64. In float32 Optax rounds its corrections, which is an error of up to 1e-5 in early rounds.

    Optax has no absent gradients: each component has a state of its own, which absent rounds do not touch. The factor
    scales all of an update, AdamW's decay included.
    """
    jax = pytest.importorskip("jax", reason="not installed: make install-frameworks")
    optax = pytest.importorskip("optax", reason="not installed: make install-frameworks")
    with jax.enable_x64(True):
        parameters = {name: jax.numpy.asarray(value) for name, value in initial_values().items()}
        optimizer = make(optax)
        update = jax.jit(optimizer.update)
        states = {name: optimizer.init(value) for name, value in parameters.items()}
        for num_applied, round_ in enumerate(rounds):
            for name in round_.updates:
                gradient = jax.numpy.asarray(round_.mean(name))
                updates, states[name] = update(gradient, states[name], parameters[name])
                parameters[name] = parameters[name] + updates * schedule.factor(num_applied)
            yield {name: np.asarray(value) for name, value in parameters.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTAX)
def test_optax(compiled: Stepper, name: str) -> None:
    optimizer, make = OPTAX[name]
    schedule = SCHEDULES["warm-up and cosine"]
    runs = {dtype: Variables(optimizer, dtype, compiled, schedule) for dtype in TOLERANCES}
    rounds = make_rounds(NUM_ROUNDS)
    for round_, expected in zip(rounds, by_optax(make, schedule, rounds), strict=True):
        for dtype, tolerance in TOLERANCES.items():
            runs[dtype].apply(round_)
            assert_close(runs[dtype], expected, tolerance)


FLOWER = json.loads(Path(__file__).with_name("flower.json").read_text())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "case", FLOWER["cases"], ids=[f"{index} {case['optimizer']['kind']}" for index, case in enumerate(FLOWER["cases"])]
)
def test_flower(compiled: Stepper, case: dict[str, Any], dtype: Any) -> None:
    optimizer = optimizer_of(case["optimizer"])
    value = np.array(FLOWER["initial"], dtype)
    slots = tuple(np.full_like(value, slot.initial_value) for slot in optimizer.slots)
    weights = FLOWER["weights"]
    for index, (deltas, expected) in enumerate(zip(FLOWER["deltas"], case["history"], strict=True)):
        *summed, last = np.array(deltas, dtype)
        total = np.asarray(sum(delta * dtype(weight) for delta, weight in zip(summed, weights[:-1], strict=True)))
        result = np.empty_like(value)
        step = ComponentStep(total, last, weights[-1], sum(weights), True, value, slots, result, index + 1)
        compiled.step(optimizer, 1.0, [step])
        value = result
        np.testing.assert_allclose(value, expected, rtol=0, atol=2.5 * TOLERANCES[dtype])


def test_plain_sgd_on_deltas_gives_the_weighted_mean_of_the_workers(compiled: Stepper) -> None:
    variables = Variables(Sgd(1.0, 0.0, 0.0, 0.0, False), np.float64, compiled, deltas=True)
    before = dict(variables.values)
    (round_,) = make_rounds(1, all_present=True)
    variables.apply(round_)
    for name in SHAPES:
        locals_: list[tuple[Array, float]] = [(before[name] + delta, weight) for delta, weight in round_.updates[name]]
        mean = sum(local * weight for local, weight in locals_) / sum(weight for _, weight in locals_)
        np.testing.assert_allclose(variables.values[name], mean, rtol=1e-14)


def test_an_absent_component_keeps_its_value_its_state_and_its_count(compiled: Stepper) -> None:
    variables = Variables(Adam(0.1, 0.9, 0.99, 1e-8, 0.0, False), np.float32, compiled)
    (round_,) = make_rounds(1, all_present=True)
    variables.apply(round_)
    kept = variables.values["w"].copy(), [slot.copy() for slot in variables.slots["w"]]
    variables.apply(Round({"b": round_.updates["b"]}))
    assert np.array_equal(variables.values["w"], kept[0])
    assert all(map(np.array_equal, variables.slots["w"], kept[1]))
    assert variables.steps == {"w": 1, "b": 2, "scale": 1}
