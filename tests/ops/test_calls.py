"""Ops as any gRPC client calls them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import fused_batch_norm_messages_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2, tensor_pb2
from gradserve_testing import LocalServer
from tests.bad_input.requests import tensor, zeros
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls

Placement = tensor_pb2.Placement
X = np.random.RandomState(0).standard_normal((2, 3, 4, 5))
FORWARD: dict[str, Any] = {
    "x": tensor(X),
    "scale": tensor(np.ones(5)),
    "offset": zeros(5),
    "mean": zeros(0),
    "variance": zeros(0),
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(_compiled_kernels: None) -> Iterator[LocalServer]:
    """A server of this file alone, as its use is compared."""
    with LocalServer() as local:
        # What is computed twice is compared to the bit, so NumPy and the kernels must not take turns.
        local.wait_until_prepared()
        yield local


@pytest.fixture(scope="module")
def raw(server: LocalServer) -> Iterator[RawCalls]:
    with RawCalls(server.address) as calls:
        yield calls


@pytest.fixture(autouse=True)
def nothing_is_left(raw: RawCalls) -> Iterator[None]:
    yield
    listed = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest())
    handles = [each.handle for each in listed.tensors]
    raw.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))
    eventually(lambda: used(raw), (0, 0).__eq__)


def used(raw: RawCalls) -> tuple[int, int]:
    usage = raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).usage
    return usage.num_bytes, usage.num_handles


def forward(raw: RawCalls, **fields: Any) -> Any:
    return raw.call("FusedBatchNorm", batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, **fields}))


def outputs(reply: Any) -> list[tensor_pb2.Tensor]:
    return [value for _, value in reply.ListFields()]


@pytest.mark.parametrize(
    ("mode", "side", "kept"),
    [
        (Placement.MODE_UNSPECIFIED, 1, False),
        (Placement.MODE_INLINE, 1, False),
        (Placement.MODE_KEEP, 1, True),
        (Placement.MODE_AUTO, 1, False),
        (Placement.MODE_INLINE, 128, False),
        (Placement.MODE_AUTO, 128, True),
    ],
)
def test_placements(raw: RawCalls, mode: Any, side: int, kept: bool) -> None:
    reply = forward(raw, x=zeros(1, side, side * 16, 5), placement={"mode": mode})
    assert {tensor.WhichOneof("data") for tensor in outputs(reply)} == {"handle" if kept else "content"}
    assert all(tensor.dtype == tensor_pb2.DATA_TYPE_FLOAT32 for tensor in outputs(reply))
    assert [list(tensor.shape) for tensor in outputs(reply)] == [[1, side, side * 16, 5], [5], [5], [5], [5], []]
    num_bytes = 4 * (side * side * 80 + 4 * 5 + 1)
    assert used(raw) == ((num_bytes, 6) if kept else (0, 0))


def test_what_is_left_out_has_its_default(raw: RawCalls) -> None:
    spelled_out = forward(
        raw, epsilon=0.0001, exponential_avg_factor=1, data_format="NHWC", is_training=True, placement={"mode": 1}
    )
    assert forward(raw) == spelled_out


@pytest.mark.parametrize("name", ["epsilon", "exponential_avg_factor", "is_training"])
def test_zero_is_not_left_out(raw: RawCalls, name: str) -> None:
    moments = {"mean": tensor(np.ones(5)), "variance": tensor(np.ones(5))}
    assert forward(raw, **moments, **{name: 0}) != forward(raw, **moments)


def test_a_handle_with_another_spec(raw: RawCalls) -> None:
    kept = forward(raw, placement={"mode": Placement.MODE_KEEP})
    same = tensor_pb2.Tensor(handle=kept.y.handle, dtype=kept.y.dtype, shape=kept.y.shape)
    forward(raw, x=same)
    same.dtype = to_data_type("float64")
    failure = raw.fail("FusedBatchNorm", batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, "x": same}))
    assert "expected the stored tensor's shape [2, 3, 4, 5] of float32" in failure.message
    assert failure.field == "x"


def test_calls_that_are_cancelled_leave_nothing(raw: RawCalls) -> None:
    x = forward(raw, x=zeros(1, 512, 512, 5), placement={"mode": Placement.MODE_KEEP}).y
    before = used(raw)
    request = batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, "x": {"handle": x.handle}})
    for number in range(200):
        call = raw.start("FusedBatchNorm", request)
        if number % 3 == 0:
            forward(raw, x=tensor_pb2.Tensor(handle=x.handle), placement={"mode": Placement.MODE_INLINE})
        call.cancel()
    # What is computing holds memory for its outputs until it has ended.
    eventually(lambda: used(raw), before.__eq__)


def test_an_input_can_be_deleted_under_its_call(raw: RawCalls) -> None:
    x = forward(raw, x=zeros(1, 512, 512, 5), placement={"mode": Placement.MODE_KEEP}).y
    request = batch_norm_pb2.FusedBatchNormRequest(**{**FORWARD, "x": {"handle": x.handle}})
    expected = raw.start("FusedBatchNorm", request).result()
    calls = [raw.start("FusedBatchNorm", request) for _ in range(4)]
    deleted = raw.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[x.handle]))
    assert deleted.num_deleted == 1
    for call in calls:
        error = call.exception()
        assert call.result() == expected if error is None else "no tensor with the handle" in error.details()
