"""Gradients of stored tensors that a call releases, when the call is sent again."""

import grpc
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from tests.servers.raw_calls import RawCalls


@pytest.mark.parametrize("method", ["ApplyGradient", "PushPull"])
def test_a_call_that_is_sent_again_names_the_handles_that_it_has_released(
    client: gradserve.Client, server_address: str, name: str, method: str
) -> None:
    accumulator = client.conditional_accumulator("float32", (2,), shared_name=name)
    handle = client.put(np.array([1, 2], np.float32))
    request = getattr(messages_pb2, f"{method}Request")(
        accumulator=accumulator_pb2.AccumulatorRef(name=name),
        request_id=accumulator_pb2.RequestId(client_id=name, sequence=1),
        gradient=[accumulator_pb2.ComponentGradient(dense=tensor_pb2.Tensor(handle=handle.handle))],
        release_handles=True,
    )
    if method == "PushPull":
        request.num_required = 2
        request.timeout.nanos = 1_000_000
    with RawCalls(server_address) as raw:
        for _ in range(2):
            if method == "PushPull":
                assert raw.fail(method, request).code is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                assert raw.call(method, request).outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED
            assert accumulator.num_accumulated() == 1
            assert handle.handle not in [each.handle for each in client.list_tensors()]
        accumulator.apply_grad([3.0, 4.0])
        if method == "PushPull":
            request.timeout.seconds = 60
            reply = raw.call(method, request)
            assert np.frombuffer(reply.average.components[0].dense.content, "<f4").tolist() == [2, 3]
