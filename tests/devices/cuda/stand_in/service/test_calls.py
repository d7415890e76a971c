"""Calls of ops that are cancelled, and whose inputs go away meanwhile."""

from typing import Any

from gradserve_protocol.v1 import fused_batch_norm_messages_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import zeros
from tests.devices.cuda.stand_in.installing import StandIn
from tests.ops.test_calls import FORWARD, nothing_is_left, raw
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls

__all__ = ["nothing_is_left", "raw"]

KEEP: Any = {"mode": tensor_pb2.Placement.MODE_KEEP}


def request(**fields: Any) -> batch_norm_pb2.FusedBatchNormRequest:
    return batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, **fields})


def test_memory_of_the_gpu_comes_back(raw: RawCalls, stand_in: StandIn) -> None:
    """From calls that are cancelled, as others go on, and from their inputs and outputs."""
    pool = stand_in.cupy.get_default_memory_pool()

    raw.call("FusedBatchNorm", request())
    before = pool.used_bytes()
    x = raw.call("FusedBatchNorm", request(x=zeros(1, 40, 40, 5), placement=KEEP))
    for number in range(30):
        call = raw.start("FusedBatchNorm", request(x={"handle": x.y.handle}, placement=KEEP))
        if number % 3 == 0:
            raw.call("FusedBatchNorm", request(x={"handle": x.y.handle}))
        call.cancel()
    assert pool.used_bytes() > before
    running = [raw.start("FusedBatchNorm", request(x={"handle": x.y.handle})) for _ in range(4)]
    kept = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest()).tensors
    raw.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[each.handle for each in kept]))
    for call in running:
        error = call.exception()
        assert error is None or "no tensor with the handle" in error.details()
    # Each thread keeps a little scratch memory, less than one of those tensors has.
    eventually(lambda: pool.used_bytes() < before + 4 * 40 * 40 * 5)
