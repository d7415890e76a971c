"""What the limits refuse."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ByteSize

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.bad_input.requests import (
    ABORTED,
    EXHAUSTED,
    MIB,
    SPECS,
    Apply,
    Create,
    PushPull,
    Read,
    Take,
    dense,
    identity,
    ref,
    state,
    zeros,
)
from tests.bad_input.test_streams import chunk, header
from tests.servers.polling import eventually
from tests.servers.raw_calls import Failure, RawCalls
from tests.servers.runtime import NOT_WARMED_UP

TINY = LimitsConfig(
    max_message_bytes=ByteSize(4 * MIB),
    max_bytes=ByteSize(100),
    max_handles=3,
    max_accumulators=2,
    max_waiters=1,
    max_clients=2,
    id_window=2,
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[RawCalls]:
    """A server with next to no room, with one accumulator of any tensor."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP, limits=TINY)) as local, RawCalls(local.address) as calls:
        calls.call("CreateAccumulator", Create(accumulator=ref("a"), spec=SPECS["any"]))
        yield calls


@pytest.fixture
def tiny_unchanged(tiny: RawCalls) -> Iterator[None]:
    before = state(tiny)
    yield
    eventually(lambda: state(tiny), before.__eq__)


@pytest.mark.usefixtures("tiny_unchanged")
class TestLimits:
    def test_accumulators(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("b"), spec=SPECS["any"]))
        failure = tiny.fail("CreateAccumulator", Create(accumulator=ref("c"), spec=SPECS["any"]))
        assert failure == Failure(EXHAUSTED, "too many accumulators: 1 asked for, 2 in use, 2 allowed", None)
        assert not tiny.call("CreateAccumulator", Create(accumulator=ref("b"), spec=SPECS["any"])).created
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("b")))
        assert tiny.call("CreateAccumulator", Create(accumulator=ref("c"), spec=SPECS["any"])).created
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("c")))

    def test_handles(self, tiny: RawCalls) -> None:
        stored = tiny.call("PutTensors", header([0], [0])).tensors
        failure = tiny.fail("PutTensors", header([0], [0]))
        assert failure == Failure(EXHAUSTED, "too many tensor handles: 2 asked for, 2 in use, 3 allowed", None)
        handles = [each.handle for each in stored]
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))

    def test_bytes_of_tensors(self, tiny: RawCalls) -> None:
        (stored,) = tiny.call("PutTensors", header([15]), chunk(60)).tensors
        failure = tiny.fail("PutTensors", header([4], [7]), chunk(44))
        text = "too many bytes of tensor memory: 44 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[stored.handle]))

    @pytest.mark.parametrize("method", ["ApplyGradient", "PushPull"])
    def test_bytes_of_accumulators(self, tiny: RawCalls, method: str) -> None:
        (stored,) = tiny.call("PutTensors", header([15]), chunk(60)).tensors
        fields: Any = {"accumulator": ref("a"), "gradient": [dense(zeros(11))]}
        request = Apply(**fields) if method == "ApplyGradient" else PushPull(**fields, num_required=1)
        failure = tiny.fail(method, request)
        text = "too many bytes of tensor memory: 44 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        tiny.call("DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[stored.handle]))

    def test_bytes_of_kept_averages(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("k"), spec=SPECS["any"]))
        fields: Any = {"accumulator": ref("k"), "gradient": [dense(zeros(15))], "request_id": identity(1)}
        push = PushPull(**fields, num_required=1, placement=tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP))
        failure = tiny.fail("PushPull", push)
        text = "too many bytes of tensor memory: 60 asked for, 60 in use, 100 allowed"
        assert failure == Failure(EXHAUSTED, text, None)
        # It was computed: the same call finds it, once there is room or it is asked for inline.
        push.placement.mode = tensor_pb2.Placement.MODE_INLINE
        answer = tiny.call("PushPull", push)
        assert answer.duplicate
        assert list(answer.average.components[0].dense.shape) == [15]
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("k")))

    def test_waiters(self, tiny: RawCalls) -> None:
        first = tiny.start("TakeGradient", Take(accumulator=ref("a"), num_required=1))
        eventually(lambda: state(tiny)[2].num_waiters, lambda waiters: waiters == 1)
        for method, request in (
            ("TakeGradient", Take(accumulator=ref("a"), num_required=1)),
            ("ReadAverage", Read(accumulator=ref("a"))),
            ("PushPull", PushPull(accumulator=ref("a"), num_required=1, gradient=[dense(zeros(1))])),
        ):
            failure = tiny.fail(method, request)
            assert failure == Failure(EXHAUSTED, "too many waiting calls: 1 asked for, 1 in use, 1 allowed", None)
        first.cancel()
        eventually(lambda: state(tiny)[2].num_waiters, lambda waiters: waiters == 0)

    def test_clients_and_ids(self, tiny: RawCalls) -> None:
        tiny.call("CreateAccumulator", Create(accumulator=ref("i"), spec=SPECS["scalar"]))

        def apply(sequence: int, client_id: str) -> Apply:
            request_id = identity(sequence, client_id)
            return Apply(accumulator=ref("i"), gradient=[dense(zeros())], request_id=request_id)

        for sequence in (1, 2, 3, (1 << 64) - 1):
            assert not tiny.call("ApplyGradient", apply(sequence, "x")).duplicate
        for old in (0, 1, 2):
            failure = tiny.fail("ApplyGradient", apply(old, "x"))
            assert (failure.code, failure.field) == (ABORTED, "request_id.sequence")
            assert f"request_id x:{old} is older than the 2 latest that are remembered" in failure.message
        assert tiny.call("ApplyGradient", apply(3, "x")).duplicate
        tiny.call("ApplyGradient", apply(1, "y"))
        failure = tiny.fail("ApplyGradient", apply(1, "z"))
        assert failure.code is EXHAUSTED
        assert failure.message == "too many clients use request ids here: 2 allowed"
        counted = messages_pb2.GetNumAccumulatedRequest(accumulator=ref("i"))
        assert tiny.call("GetNumAccumulated", counted).num_accumulated == 5
        tiny.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref("i")))

    def test_message_bytes(self, tiny: RawCalls) -> None:
        failure = tiny.fail("ApplyGradient", Apply(accumulator=ref("a"), gradient=[dense(zeros(MIB))]))
        assert failure.code is EXHAUSTED
        assert re.search(r"Received message larger than max \(4\d{6} vs\. 4194304\)", failure.message)
