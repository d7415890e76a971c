"""Memory that a layer keeps is not taken over by others, however their calls overlap; without a socket."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2
from gradserve_server.config import LeaseConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.resources.memory import Memory
from gradserve_server.rpc.batch_norm_layers.service import BatchNormLayerServicer
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.tensors.messages import InlineLimits, TensorDeliverer
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.tensors.store import TensorStore
from tests.journals import EventJournal
from tests.layers.bench import KEY, LayerBench
from tests.tensors.keeping import keep_now

LAYER = batch_norm_pb2.BatchNormLayerRef(container=KEY.container, name=KEY.name)
STORED = tensor_pb2.Tensor(handle="stored")
BETA = layer_pb2.NamedTensor(name="beta", tensor=STORED)
CALL = Call("test")

MakeCall = Callable[[BatchNormLayerServicer], Any]
CALLS: dict[str, tuple[tuple[int, ...], MakeCall]] = {
    "forward": (
        (4, 3),
        lambda service: service.BatchNormForward(
            messages_pb2.BatchNormForwardRequest(layer=LAYER, inputs=STORED), CALL
        ),
    ),
    "set_variables": (
        (3,),
        lambda service: service.SetBatchNormVariables(
            messages_pb2.SetBatchNormVariablesRequest(layer=LAYER, variables=[BETA]), CALL
        ),
    ),
}


class Hiding(EventJournal[Event]):
    """A journal that lets another call in which releases a tensor, and so hides it from all that begin later."""

    def __init__(self) -> None:
        self.hidden = AsyncExitStack()
        self.store: TensorStore | None = None

    async def append(self, event: Event) -> None:
        if self.store is not None:
            held = await self.hidden.enter_async_context(self.store.use(["stored"], release=True))
            assert not held.exclusive


@pytest.mark.parametrize(("shape", "call"), CALLS.values(), ids=list(CALLS))
async def test_what_another_call_hides_meanwhile(shape: tuple[int, ...], call: MakeCall) -> None:
    """A call that would delete the tensor hides it; that call fails when this one is done, so it is there again."""
    hiding = Hiding()
    bench = LayerBench(journal=hiding)
    store = TensorStore(
        pool=BufferPool(0),
        memory=Memory(bench.memory),
        handles=bench.handles,
        leases=LeaseConfig(),
        clock=lambda: 0.0,
        new_handle=lambda: "stored",
    )
    host = CpuDevice(BufferPool(0))
    residence = Residence(host, host, InlineCompute())
    opener = TensorOpener(store, residence, InlineCompute())
    deliverer = TensorDeliverer(store, residence, InlineCompute(), Memory(bench.memory), InlineLimits(1 << 20, 1 << 20))
    service = BatchNormLayerServicer(bench.registry, opener, deliverer, store.lease_seconds)
    await bench.layer().build(np.dtype(np.float32), (-1, 3))
    keep_now(store, [np.ones(shape, np.float32)], None, shared=False)
    hiding.store = store
    await call(service)
    with pytest.raises(ValueError, match="it failed"):
        async with hiding.hidden:
            raise ValueError("it failed")
    async with store.use(["stored"], release=True) as found:
        assert not found.exclusive
