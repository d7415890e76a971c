"""Single requests of many small parts: the event loop goes on meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import tensor_messages_pb2, tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_server.rpc.boundary.call import Call
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
from tests.floods.work import longest_turn
from tests.servers.runtime import NOT_WARMED_UP

PARTS = 6000
MOST_CALLS = 8 * PARTS
"""The most calls in a turn of the event loop: a few for each part, where all calls together are dozens for each."""

KEEP = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP)
NAMES = [f"layer {index}" for index in range(PARTS)]
CALL = Call("test")


class Servicers:
    """The servicers of a running server, called on its event loop."""

    def __init__(self, server: Server) -> None:
        self._all = {service.descriptor.name: service.servicer for service in server._services.all}

    async def call(self, method: str, request: Any, service: str = "AccumulatorService") -> Any:
        """Returns the answer of a method, if it leaves others their turns."""
        answer, longest = await longest_turn(getattr(self._all[service], method)(request, CALL))
        assert longest < MOST_CALLS, f"{longest} calls in one turn of {method}"
        return answer


@pytest.fixture
async def servicers() -> AsyncIterator[Servicers]:
    listen = ListenConfig(listen=("127.0.0.1:0",), bulk_listen="off", shared_memory_socket="off")
    async with Server(ServerConfig(listen=listen, runtime=NOT_WARMED_UP)) as server:
        yield Servicers(server)


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
