"""Optimizers and schedules as messages."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gradserve.optim.flower import FedAdagrad, FedAdam, FedAvgM, FedYogi
from gradserve.optim.optimizers import SGD, Adagrad, AdagradOptax, Adam, AdamW, Optimizer, Schedule, Yogi
from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import parameters_pb2

_KINDS: Mapping[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adagrad": Adagrad,
    "yogi": Yogi,
    "flower_adam": FedAdam,
    "flower_yogi": FedYogi,
    "flower_adagrad": FedAdagrad,
    "flower_avg_m": FedAvgM,
    "adagrad_optax": AdagradOptax,
}
"""The optimizers by the names of their messages. AdamW is `adam`, decoupled."""

_NAMES = {kind: name for name, kind in _KINDS.items()} | {AdamW: "adam"}
_BETAS = ("beta1", "beta2")


def optimizer_message(optimizer: object, argument: Argument) -> parameters_pb2.Optimizer:
    """Returns the message of an optimizer.

    Raises:
        InvalidArgumentError: It is not an optimizer of `gradserve.optim`.
    """
    name = _NAMES.get(type(optimizer))  # type: ignore[arg-type]
    if name is None:
        raise argument.error("an optimizer of gradserve.optim", optimizer)
    message = parameters_pb2.Optimizer()
    settings = getattr(message, name)
    settings.SetInParent()  # it may have no other number than 0
    for each, value in vars(optimizer).items():
        parts = zip(_BETAS, value, strict=True) if each == "betas" else [(_field(each), value)]
        for field, part in parts:
            setattr(settings, field, part)
    if isinstance(optimizer, AdamW):
        settings.decoupled = True
    return message


def optimizer_of(message: parameters_pb2.Optimizer) -> Optimizer | None:
    """Returns the optimizer of a message; None if there is none, or one that only newer clients know."""
    name = message.WhichOneof("kind")
    if name is None:
        return None
    settings = getattr(message, name)
    kind = AdamW if name == "adam" and settings.decoupled else _KINDS[name]
    return kind(**{each.name: _setting(settings, each.name) for each in fields(kind)})


def _setting(settings: Any, name: str) -> Any:
    if name == "betas":
        return tuple(getattr(settings, field) for field in _BETAS)
    return getattr(settings, _field(name))


def _field(name: str) -> str:
    """Returns the field of a setting: Flower writes beta_1."""
    return name.replace("beta_", "beta")


def schedule_message(schedule: object, argument: Argument) -> parameters_pb2.Schedule:
    """Returns the message of a schedule.

    Raises:
        InvalidArgumentError: It is not a schedule of `gradserve.optim`.
    """
    if not isinstance(schedule, Schedule):
        raise argument.error("a schedule of gradserve.optim", schedule)
    message = parameters_pb2.Schedule(warmup=schedule.warmup)
    course = getattr(message, schedule.kind)
    course.SetInParent()
    if schedule.kind != "constant":
        course.rounds, course.end = schedule.rounds, schedule.end
    return message


def schedule_of(message: parameters_pb2.Schedule) -> Schedule:
    """Returns the schedule of a message."""
    kind = message.WhichOneof("kind") or "constant"
    if kind == "constant":
        return Schedule(kind, message.warmup)
    course = getattr(message, kind)
    return Schedule(kind, message.warmup, course.rounds, course.end)
