"""Optimizers and schedules as messages."""

from typing import Any, TypeAlias

from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import parameters_pb2

Optimizer: TypeAlias = Any
Schedule: TypeAlias = Any
_DEFAULT = parameters_pb2.Optimizer(sgd=parameters_pb2.Sgd(lr=1.0))


def optimizer_message(value: object, argument: Argument) -> parameters_pb2.Optimizer:
    if value is None:
        return _DEFAULT
    if isinstance(value, parameters_pb2.Optimizer):
        return value
    raise argument.error("an optimizer of gradserve.optim", value)


def optimizer_of(message: parameters_pb2.Optimizer) -> Any:
    return message


def schedule_message(value: object, argument: Argument) -> parameters_pb2.Schedule:
    if isinstance(value, parameters_pb2.Schedule):
        return value
    raise argument.error("a schedule of gradserve.optim", value)


def schedule_of(message: parameters_pb2.Schedule) -> Any:
    return message
