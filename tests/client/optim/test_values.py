"""Optimizers and schedules as values: reprs, defaults, conversions and mistakes."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import optim
from gradserve.optim.messages import optimizer_message, optimizer_of, schedule_message, schedule_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import parameters_pb2
from tests.client.optim.values import OPTIMIZERS, SCHEDULES
from tests.together import together

ARGUMENT = Argument("optimizer")
NAMES = {name: getattr(optim, name) for name in optim.__all__} | vars(optim.flower)


@together("text", [*OPTIMIZERS, *SCHEDULES])
def test_a_repr_is_the_call_that_makes_it(text: str) -> None:
    value = {**OPTIMIZERS, **SCHEDULES}[text]
    assert repr(value) == text
    assert eval(text, dict(NAMES)) == value  # noqa: S307
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value  # noqa: S301
    assert len({value, copy.copy(value)}) == 1
    assert type(value).__module__ in ("gradserve.optim", "gradserve.optim.flower")


@together("optimizer", OPTIMIZERS.values())
def test_messages_of_optimizers(optimizer: optim.Optimizer) -> None:
    message = optimizer_message(optimizer, ARGUMENT)
    assert optimizer_of(parameters_pb2.Optimizer.FromString(message.SerializeToString())) == optimizer


@together("schedule", SCHEDULES.values())
def test_messages_of_schedules(schedule: optim.Schedule) -> None:
    message = schedule_message(schedule, Argument("schedule"))
    assert schedule_of(parameters_pb2.Schedule.FromString(message.SerializeToString())) == schedule


def test_every_kind_of_the_contract_has_a_class() -> None:
    kinds = {optimizer_message(each, ARGUMENT).WhichOneof("kind") for each in OPTIMIZERS.values()}
    assert kinds == {field.name for field in parameters_pb2.Optimizer.DESCRIPTOR.fields}


def test_an_optimizer_of_a_newer_server() -> None:
    assert optimizer_of(parameters_pb2.Optimizer()) is None


def test_a_message_without_a_kind_is_a_constant_schedule() -> None:
    assert schedule_of(parameters_pb2.Schedule(warmup=2)) == optim.constant(warmup=2)


def test_numbers_of_other_libraries_become_numbers() -> None:
    made = optim.Adam(np.float32(0.5), betas=np.array([0.25, 0.5]), eps=1)  # type: ignore[arg-type]
    assert made == optim.Adam(0.5, (0.25, 0.5), 1.0)
    assert [type(each) for each in (made.lr, *made.betas, made.eps)] == [float] * 4
    assert optim.SGD(1, 1, nesterov=np.True_).nesterov is True  # type: ignore[arg-type]


MISTAKES: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: optim.SGD("0.1"), "lr", "a number for lr, got '0.1'"),  # type: ignore[arg-type]
    (lambda: optim.SGD(None), "lr", "a number for lr, got None"),  # type: ignore[arg-type]
    (lambda: optim.SGD([0.1, 0.2]), "lr", "a number for lr"),  # type: ignore[arg-type]
    (lambda: optim.SGD(0.1, nesterov=3), "nesterov", "True or False for nesterov, got 3"),  # type: ignore[arg-type]
    (lambda: optim.Adam(betas=0.9), "betas", "two numbers for betas, got 0.9"),  # type: ignore[arg-type]
    (lambda: optim.Adam(betas=(0.9,)), "betas", "two numbers for betas, got (0.9,)"),  # type: ignore[arg-type]
    (lambda: optim.Adam(betas=(0.9, "x")), "betas", "a number for betas, got 'x'"),  # type: ignore[arg-type]
    (lambda: optim.flower.FedAdam(tau={}), "tau", "a number for tau, got {}"),  # type: ignore[arg-type]
    (lambda: optim.linear(1.5), "rounds", "an integer for rounds, got 1.5"),  # type: ignore[arg-type]
    (lambda: optim.cosine(1 << 63), "rounds", "an integer from"),
    (lambda: optim.cosine(10, "much"), "end", "a number for end, got 'much'"),  # type: ignore[arg-type]
    (lambda: optim.constant(warmup="long"), "warmup", "an integer for warmup, got 'long'"),  # type: ignore[arg-type]
    (
        lambda: optimizer_message("sgd", ARGUMENT),
        "optimizer",
        "an optimizer of gradserve.optim for optimizer, got 'sgd'",
    ),
    (
        lambda: optimizer_message(optim.SGD, ARGUMENT),
        "optimizer",
        "an optimizer of gradserve.optim for optimizer, got SGD",
    ),
    (lambda: schedule_message(0.5, Argument("schedule")), "schedule", "a schedule of gradserve.optim for schedule"),
]


@together("make, field, message", *zip(*MISTAKES, strict=True))
def test_mistakes(make: Callable[[], Any], field: str, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as caught:
        make()
    assert caught.value.field == field
    assert f"expected {message}" in caught.value.message


def test_numbers_that_the_server_judges() -> None:
    """So a new server may take more of them."""
    assert math.isnan(optim.SGD(math.nan).lr)
    assert optim.Adam(betas=(-1, 2)).betas == (-1.0, 2.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_arguments_and_defaults_are_those_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="not installed: make install-frameworks")
    its = inspect.signature(getattr(torch.optim, name)).parameters
    for parameter in inspect.signature(getattr(optim, name)).parameters.values():
        assert parameter.name in its
        if parameter.default is not parameter.empty:
            assert parameter.default == its[parameter.name].default


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ours", "theirs"), [("Yogi", "yogi"), ("AdagradOptax", "adagrad"), ("adagrad_optax", "adagrad")]
)
def test_defaults_are_those_of_optax(ours: str, theirs: str) -> None:
    optax = pytest.importorskip("optax", reason="not installed: make install-frameworks")
    its = inspect.signature(getattr(optax, theirs)).parameters
    own = inspect.signature(getattr(optim, ours)).parameters
    defaults = {name: each.default for name, each in own.items() if each.default is not each.empty}
    if "betas" in defaults:
        defaults["b1"], defaults["b2"] = defaults.pop("betas")
        value = inspect.signature(optax.scale_by_yogi).parameters["initial_accumulator_value"].default
        assert defaults.pop("initial_accumulator_value") == value
    assert defaults == {name: its[name].default for name in defaults}
