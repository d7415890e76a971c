"""Requests of ParameterService."""

from typing import Any

import numpy as np

from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from tests.bad_input.requests import component, dense, identity, tensor, zeros

Create = messages_pb2.CreateParametersRequest

Get = messages_pb2.GetParametersRequest

List = messages_pb2.ListParametersRequest

Delete = messages_pb2.DeleteParametersRequest

Read = messages_pb2.ReadParametersRequest

Push = messages_pb2.PushRequest

PushPull = messages_pb2.PushPullParametersRequest

Change = messages_pb2.ChangeParametersRequest

Fork = messages_pb2.ForkParametersRequest

Rounds = messages_pb2.ListRoundsRequest

Report = messages_pb2.ReportEvaluationRequest

Evaluations = messages_pb2.ListEvaluationsRequest

SGD = parameters_pb2.Optimizer(sgd=parameters_pb2.Sgd(lr=1.0))
"""With this optimizer, the mean of deltas is added to the parameters."""
MOMENTUM = parameters_pb2.Optimizer(sgd=parameters_pb2.Sgd(lr=1.0, momentum=0.5))

W, B = component("w", dims=[2, 3]), component("b", dims=[3])


def ref(name: str = "net", **fields: Any) -> parameters_pb2.ParametersRef:
    return parameters_pb2.ParametersRef(name=name, **fields)


def spec(*components: accumulator_pb2.ComponentSpec, **fields: Any) -> parameters_pb2.ParametersSpec:
    """Returns a spec with plain SGD, whose rounds end with the first update, unless fields say otherwise."""
    fields = {"optimizer": SGD, "rounds": parameters_pb2.RoundRules(num_required=1), **fields}
    return parameters_pb2.ParametersSpec(components=components or (W, B), **fields)


def values(w: float = 0.0, b: float = 0.0) -> list[accumulator_pb2.ComponentGradient]:
    """Returns values of W and B, each of which has one number."""
    return [dense(tensor(np.full((2, 3), w)), "w"), dense(tensor(np.full(3, b)), "b")]


def create(name: str = "net", **fields: Any) -> messages_pb2.CreateParametersRequest:
    return Create(parameters=ref(name), **{"spec": spec(), "values": values(), **fields})


def push(name: str = "net", *, sequence: int = 0, **fields: Any) -> messages_pb2.PushRequest:
    """Returns the push of an update of 1, with the id of a call if it has a sequence number."""
    call = identity(sequence) if sequence else None
    return Push(parameters=ref(name), request_id=call, **{"update": values(1.0, 1.0), **fields})


def push_pull(name: str = "net", **fields: Any) -> messages_pb2.PushPullParametersRequest:
    return PushPull(parameters=ref(name), **{"update": values(1.0, 1.0), **fields})


def summands(*weights: float) -> list[accumulator_pb2.Summand]:
    """Returns the summands of workers a, b, ..., each with the id of its call."""
    workers = [chr(ord("a") + number) for number in range(len(weights))]
    return [
        accumulator_pb2.Summand(worker_id=worker, weight=weight, request_id=identity(1, worker))
        for worker, weight in zip(workers, weights, strict=True)
    ]


def numbers_in(version: parameters_pb2.Version) -> dict[str, set[float]]:
    """Returns the numbers of each component of a version."""
    return {each.name: set(np.frombuffer(each.dense.content, np.float32).tolist()) for each in version.components}


def slot(name: str, component_name: str, value: tensor_pb2.Tensor) -> parameters_pb2.Slot:
    return parameters_pb2.Slot(name=name, component=component_name, value=value)


STATE = parameters_pb2.OptimizerState(
    slots=[slot("momentum_buffer", "w", zeros(2, 3)), slot("momentum_buffer", "b", zeros(3))],
    component_steps=[4, 5],
    rounds=6,
    optimizer=MOMENTUM,
)
"""The state of `MOMENTUM` for W and B."""
