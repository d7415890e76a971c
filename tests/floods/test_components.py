"""Single requests of many small parts: the event loop goes on meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import (
    SPARSE,
    Apply,
    Create,
    PushPull,
    Read,
    Take,
    component,
    dense,
    identity,
    ref,
    sparse,
    spec,
    zeros,
)
from tests.bad_input.test_streams import header
from tests.floods.servicers import PARTS, Servicers

KEEP = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP)
NAMES = [f"layer {index}" for index in range(PARTS)]


LAYOUTS: dict[str, Any] = {"dense": {}, "sparse": SPARSE}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_round_of_many_components(servicers: Servicers, layout: str) -> None:
    many = spec(*[component(name, **LAYOUTS[layout]) for name in NAMES])
    create = Create(accumulator=ref("a"), spec=many)
    assert (await servicers.call("CreateAccumulator", create)).created
    assert not (await servicers.call("CreateAccumulator", create)).created
    info = (await servicers.call("GetAccumulator", messages_pb2.GetAccumulatorRequest(accumulator=ref("a")))).info
    assert [each.name for each in info.spec.components] == NAMES
    await servicers.call("ListAccumulators", messages_pb2.ListAccumulatorsRequest())
    if layout == "dense":
        gradient = [dense(zeros(1), name) for name in NAMES]
    else:
        gradient = [sparse([0], (1, 1), name=name) for name in NAMES]
    for sequence in (1, 2):
        applied = await servicers.call(
            "ApplyGradient", Apply(accumulator=ref("a"), gradient=gradient, request_id=identity(sequence))
        )
        assert applied.num_accumulated == sequence
    taken = await servicers.call("TakeGradient", Take(accumulator=ref("a"), num_required=2))
    assert [each.name for each in taken.message.average.components] == NAMES
    pulled = await servicers.call(
        "PushPull", PushPull(accumulator=ref("a"), gradient=gradient, num_required=1, local_step=1, placement=KEEP)
    )
    assert len(pulled.message.average.components) == PARTS
    read = await servicers.call("ReadAverage", Read(accumulator=ref("a"), placement=KEEP))
    assert len(read.message.average.components) == PARTS


async def test_many_empty_tensors(servicers: Servicers) -> None:
    async def upload() -> AsyncIterator[Any]:
        yield header(*[[0]] * PARTS)

    async def call(method: str, request: Any) -> Any:
        return await servicers.call(method, request, "TensorService")

    put = await call("PutTensors", upload())
    assert len({each.handle for each in put.tensors}) == PARTS
    empty = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[0], content=b"")
    stored = await call("StoreTensors", tensor_messages_pb2.StoreTensorsRequest(tensors=[empty] * PARTS))
    assert len({each.handle for each in stored.tensors}) == PARTS
    reading = tensor_messages_pb2.ReadTensorsRequest(handles=[each.handle for each in put.tensors])
    assert len((await call("ReadTensors", reading)).message.tensors) == PARTS
    handles = [each.handle for each in (*put.tensors, *stored.tensors)]
    deleted = await call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))
    assert deleted.num_deleted == 2 * PARTS
