"""Decodes and encodes optimizers and schedules; the fields of their messages have the names of the settings."""

from dataclasses import fields
from typing import Any

from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.parameters.optimizers import OPTIMIZERS, name_of
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.optimizers.schedule import Schedule, ScheduleKind


def decode_optimizer(message: parameters_pb2.Optimizer, field: str = "optimizer") -> Optimizer:
    """Reads an optimizer.

    Args:
        message: The message.
        field: Its path in the request, with which the fields of errors begin: "optimizer.sgd.lr".

    Raises:
        InvalidArgumentError: It is unset or unknown, or a setting is out of its range.
    """
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidArgumentError(f"expected one of {', '.join(OPTIMIZERS)}, got none", field=field)
    kind, settings = OPTIMIZERS[name], getattr(message, name)
    with request_fields({"optimizer": f"{field}.{name}"}):
        return kind(**{each.name: getattr(settings, each.name) for each in fields(kind)})


def encode_optimizer(optimizer: Optimizer) -> parameters_pb2.Optimizer:
    """Writes an optimizer."""
    message = parameters_pb2.Optimizer()
    settings = getattr(message, name_of(optimizer))
    settings.SetInParent()  # it may have no other number than 0
    for name, value in vars(optimizer).items():
        setattr(settings, name, value)
    return message


def decode_schedule(message: parameters_pb2.Schedule, field: str = "schedule") -> Schedule:
    """Reads a schedule; one without a kind is constant after its warm-up.

    Args:
        message: The message.
        field: Its path in the request, with which the fields of errors begin: "schedule.cosine.rounds".

    Raises:
        InvalidArgumentError: A value is out of its range.
    """
    name = message.WhichOneof("kind") or ScheduleKind.CONSTANT.value
    kind, values = ScheduleKind(name), getattr(message, name)
    course: dict[str, Any] = {}
    if kind is not ScheduleKind.CONSTANT:
        course = {"rounds": values.rounds, "end": values.end}
    paths = {f"schedule.{each}": f"{field}.{name}.{each}" for each in course}
    with request_fields({**paths, "schedule": field}):
        return Schedule(kind, message.warmup, **course)


def encode_schedule(schedule: Schedule) -> parameters_pb2.Schedule:
    """Writes a schedule."""
    message = parameters_pb2.Schedule(warmup=schedule.warmup)
    values = getattr(message, schedule.kind.value)
    values.SetInParent()
    if schedule.kind is not ScheduleKind.CONSTANT:
        values.rounds, values.end = schedule.rounds, schedule.end
    return message
