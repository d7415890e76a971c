"""The operations that faults are done to, and what each has changed on the server."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradserve
import gradserve.aio
from tests.arguments.calls import GRU, LAYER_NORM, NORMALIZE, RNN, ones

SIZE = 100_000
"""The elements of gradients and tensors: 400 kB, which travel beside the message wherever that is possible."""
VALUES = np.arange(SIZE, dtype=np.float32)
LEASE_SECONDS = 0.5
"""The lease of what is put: when its reply is lost, nobody has the handle, and it ends with its lease."""
MODEL = {"w": np.zeros(SIZE, np.float32)}
INPUTS = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclass(frozen=True)
class Place:
    """Where an operation works.

    Attributes:
        name: The name of its accumulator or layer.
        direct: A client over which nothing fails.
        given: What was prepared for it.
    """

    name: str
    direct: gradserve.Client
    given: Any = None

    def model(self) -> gradserve.GradientAccumulator:
        return self.direct.gradient_accumulator(MODEL, self.name, reduction_type="SUM")

    def layer(self) -> gradserve.BatchNormLayer:
        return self.direct.batch_norm(scope=self.name, updates_collections=None)


Prepare = Callable[[Place], Any]
Begin = Callable[[gradserve.aio.Client, Place, Any], Awaitable[Any]]
Count = Callable[[Place], int]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        methods: The methods that carry it out.
        begin: Calls it over a client, with a request id (or the id of a forward) or None.
        prepare: Makes what it needs.
        count: Tells how often it has had its effect.
        is_right: True if it had the right result.
    """

    methods: frozenset[str]
    begin: Begin
    prepare: Prepare = lambda place: None
    count: Count = lambda place: 0
    is_right: Callable[[Any], bool] = lambda result: True


async def _model(client: gradserve.aio.Client, place: Place) -> gradserve.aio.GradientAccumulator:
    return await client.gradient_accumulator(MODEL, place.name, reduction_type="SUM")


async def _apply(client: gradserve.aio.Client, place: Place, request_id: int | None) -> Any:
    return await (await _model(client, place)).apply_grad({"w": VALUES}, request_id=request_id)


async def _take(client: gradserve.aio.Client, place: Place, request_id: int | None) -> Any:
    return await (await _model(client, place)).take_grad(1, request_id=request_id)


async def _push_pull(client: gradserve.aio.Client, place: Place, request_id: int | None) -> Any:
    return await (await _model(client, place)).push_pull({"w": VALUES}, 1, request_id=request_id)


async def _push_pull_of_two(client: gradserve.aio.Client, place: Place, request_id: int | None) -> Any:
    return await (await _model(client, place)).push_pull({"w": VALUES}, 2, request_id=request_id)


async def _read(client: gradserve.aio.Client, place: Place, _: int | None) -> Any:
    return await (await _model(client, place)).read_average()


async def _put(client: gradserve.aio.Client, _place: Place, _: int | None) -> Any:
    return await client.put(VALUES, lease=LEASE_SECONDS)


async def _get(client: gradserve.aio.Client, place: Place, _: int | None) -> Any:
    return await client.get(place.given)


async def _forward(client: gradserve.aio.Client, place: Place, _: int | None) -> Any:
    layer = await client.batch_norm(scope=place.name, updates_collections=None)
    return await layer.forward(INPUTS, keep_for_backward=False, forward_id=f"{place.name}-1")


async def _backward(client: gradserve.aio.Client, place: Place, _: int | None) -> Any:
    layer = await client.batch_norm(scope=place.name, updates_collections=None)
    return await layer.backward(np.ones_like(INPUTS), place.given, retain=True)


def _op(name: str, arguments: dict[str, Any]) -> Operation:
    async def compute(client: gradserve.aio.Client, _place: Place, _: int | None) -> Any:
        return await getattr(client.raw_ops, name)(**arguments)

    method = name.removesuffix("V3")
    return Operation(frozenset({method}), compute)


def _prepare_model(place: Place) -> Any:
    return place.model()


def _prepare_gradient(place: Place) -> Any:
    return place.model().apply_grad({"w": VALUES})


def _prepare_average(place: Place) -> Any:
    return place.model().push_pull({"w": VALUES}, 1)


def _prepare_tensor(place: Place) -> Any:
    return place.direct.put(VALUES)


def _prepare_layer(place: Place) -> Any:
    place.layer().forward(INPUTS, keep_for_backward=False)  # creates the variables


def _prepare_forward(place: Place) -> Any:
    return place.layer().forward(INPUTS)


def _gradients(place: Place) -> int:
    return place.model().num_accumulated()


def _steps(place: Place) -> int:
    return place.model().info().global_step


def _updates(place: Place) -> int:
    return place.layer().describe().num_updates


def _is_average(result: Any) -> bool:
    return bool(np.array_equal(result["w"], VALUES))


def _is_tensor(result: Any) -> bool:
    return bool(np.array_equal(result, VALUES))


def _is_accepted(result: Any) -> bool:
    return result.outcome is gradserve.ACCEPTED


OPERATIONS: dict[str, Operation] = {
    "apply": Operation(frozenset({"ApplyGradient"}), _apply, _prepare_model, _gradients, _is_accepted),
    "take": Operation(frozenset({"TakeGradient"}), _take, _prepare_gradient, _steps, _is_average),
    "push_pull": Operation(frozenset({"PushPull"}), _push_pull, _prepare_model, _steps, _is_average),
    "read": Operation(frozenset({"ReadAverage"}), _read, _prepare_average, is_right=_is_average),
    "put": Operation(frozenset({"PutTensors", "StoreTensors"}), _put),
    "get": Operation(frozenset({"GetTensors", "ReadTensors"}), _get, _prepare_tensor, is_right=_is_tensor),
    "FusedBatchNorm": _op("FusedBatchNormV3", NORMALIZE),
    "GRUBlockCell": _op("GRUBlockCell", GRU),
    "CudnnRNN": _op("CudnnRNNV3", RNN),
    "LayerNorm": _op("LayerNorm", LAYER_NORM | {"offset": ones(3)}),
    "forward": Operation(frozenset({"BatchNormForward"}), _forward, _prepare_layer, _updates),
    "backward": Operation(frozenset({"BatchNormBackward"}), _backward, _prepare_forward),
}
"""What is held before it is carried out, or loses its reply."""

WAITS = ", waiting"

WAITING: dict[str, Operation] = {
    f"take{WAITS}": Operation(frozenset(), _take, _prepare_model, _steps),
    f"push_pull{WAITS}": Operation(frozenset(), _push_pull_of_two, _prepare_model, _gradients),
    f"read{WAITS}": Operation(frozenset(), _read, _prepare_model),
}
"""What waits for others."""

METHODS = frozenset[str]().union(*(operation.methods for operation in OPERATIONS.values()))
