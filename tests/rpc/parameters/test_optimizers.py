"""Optimizers and schedules in requests: what clients send, what the server makes of it, and mistakes."""

import json
import math
from typing import Any

import pytest

from gradserve.optim import Optimizer, Schedule
from gradserve.optim.messages import optimizer_message, optimizer_of, schedule_message, schedule_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import parameters_pb2 as pb2
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.optimizers import OPTIMIZERS, optimizer_record
from gradserve_server.parameters.optimizers import optimizer_of as of_record
from gradserve_server.rpc.parameters.rules import (
    decode_optimizer,
    decode_schedule,
    encode_optimizer,
    encode_schedule,
)
from tests.client.optim import values
from tests.together import together


@together("optimizer", values.OPTIMIZERS.values())
def test_an_optimizer_comes_back_as_it_was_sent(optimizer: Optimizer) -> None:
    sent = optimizer_message(optimizer, Argument("optimizer"))
    decoded = decode_optimizer(sent)
    assert encode_optimizer(decoded) == sent
    assert optimizer_of(encode_optimizer(decoded)) == optimizer
    assert encode_optimizer(of_record(json.loads(json.dumps(optimizer_record(decoded))))) == sent


@together("schedule", values.SCHEDULES.values())
def test_a_schedule_comes_back_as_it_was_sent(schedule: Schedule) -> None:
    sent = schedule_message(schedule, Argument("schedule"))
    assert encode_schedule(decode_schedule(sent)) == sent
    assert schedule_of(encode_schedule(decode_schedule(sent))) == schedule


def test_fields_of_messages_are_the_settings() -> None:
    for field in pb2.Optimizer.DESCRIPTOR.fields:
        settings = OPTIMIZERS[field.name].__dataclass_fields__
        assert field.message_type is not None
        assert [each.name for each in field.message_type.fields] == list(settings)


def test_an_unset_schedule_is_constant() -> None:
    assert decode_schedule(pb2.Schedule()).factor(77) == 1.0


BAD: list[tuple[pb2.Optimizer, str, str]] = [
    (pb2.Optimizer(), "spec.optimizer", "expected one of sgd, adam, "),
    (pb2.Optimizer(sgd=pb2.Sgd(lr=-1)), "spec.optimizer.sgd.lr", "a number from 0 to 3.4e+38 for lr, got -1.0"),
    (pb2.Optimizer(sgd=pb2.Sgd(lr=math.nan)), "spec.optimizer.sgd.lr", "a finite number for lr, got nan"),
    (pb2.Optimizer(sgd=pb2.Sgd(lr=1, nesterov=True)), "spec.optimizer.sgd.nesterov", "a momentum with nesterov"),
    (
        pb2.Optimizer(sgd=pb2.Sgd(lr=1, nesterov=True, momentum=0.9, dampening=0.1)),
        "spec.optimizer.sgd.nesterov",
        "dampening 0 with nesterov, got 0.1",
    ),
    (pb2.Optimizer(adam=pb2.Adam(lr=1, beta1=1)), "spec.optimizer.adam.beta1", "less than 1 for beta1, got 1.0"),
    (pb2.Optimizer(adagrad=pb2.Adagrad(lr_decay=-1)), "spec.optimizer.adagrad.lr_decay", "got -1.0"),
    (pb2.Optimizer(yogi=pb2.Yogi(beta2=math.inf)), "spec.optimizer.yogi.beta2", "got inf"),
    (pb2.Optimizer(flower_adam=pb2.FlowerAdam(tau=-1)), "spec.optimizer.flower_adam.tau", "got -1.0"),
    (pb2.Optimizer(flower_yogi=pb2.FlowerYogi(eta=1e300)), "spec.optimizer.flower_yogi.eta", "got 1e+300"),
    (pb2.Optimizer(flower_adagrad=pb2.FlowerAdagrad(eta=-1)), "spec.optimizer.flower_adagrad.eta", "got -1.0"),
    (
        pb2.Optimizer(flower_avg_m=pb2.FlowerAvgM(server_momentum=-1)),
        "spec.optimizer.flower_avg_m.server_momentum",
        "got -1.0",
    ),
    (pb2.Optimizer(adagrad_optax=pb2.AdagradOptax(eps=-1)), "spec.optimizer.adagrad_optax.eps", "got -1.0"),
]


@together("message, field, text", *zip(*BAD, strict=True))
def test_bad_optimizers(message: pb2.Optimizer, field: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected") as caught:
        decode_optimizer(message, "spec.optimizer")
    assert caught.value.field == field
    assert text in caught.value.message


BAD_SCHEDULES: list[tuple[Any, str]] = [
    (pb2.Schedule(warmup=-1), "spec.schedule.warmup"),
    (pb2.Schedule(linear=pb2.LinearSchedule()), "spec.schedule.linear.rounds"),
    (pb2.Schedule(cosine=pb2.CosineSchedule(rounds=-1)), "spec.schedule.cosine.rounds"),
    (pb2.Schedule(cosine=pb2.CosineSchedule(rounds=3, end=-1)), "spec.schedule.cosine.end"),
    (pb2.Schedule(linear=pb2.LinearSchedule(rounds=3, end=math.nan)), "spec.schedule.linear.end"),
    (pb2.Schedule(linear=pb2.LinearSchedule(rounds=3), warmup=-3), "spec.schedule.warmup"),
]


@together("message, field", *zip(*BAD_SCHEDULES, strict=True))
def test_bad_schedules(message: pb2.Schedule, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected") as caught:
        decode_schedule(message, "spec.schedule")
    assert caught.value.field == field
