"""Sequence lengths, which CudnnRNN uses as indices, in memory that a client rewrites in the middle of the call."""

import mmap
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf.message import Message

from gradserve_protocol.frames import Segment
from gradserve_protocol.v1 import cudnn_rnn_messages_pb2 as rnn_pb2
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.ops.cudnn_rnn.cpu import family
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from tests.bad_input.beside import move_contents
from tests.bad_input.requests import tensor
from tests.rpc.sockets.conftest import Connect
from tests.rpc.sockets.test_regions import PAGE, with_region
from tests.servers.frames import FrameClient
from tests.servers.raw_calls import RawCalls

MessageT = TypeVar("MessageT", bound=Message)

STEPS, BATCH, SIZE, UNITS = 5, 3, 4, 6
LENGTHS = np.array([2, 5, 1], np.int32)
OTHER_LENGTHS = {"valid": STEPS, "beyond the end": 1 << 30, "negative": -7}
_RANDOM = np.random.default_rng(7)


def random(*shape: int) -> tensor_pb2.Tensor:
    return tensor(_RANDOM.normal(size=shape))


FORWARD: dict[str, Any] = {
    "input": random(STEPS, BATCH, SIZE),
    "input_h": random(1, BATCH, UNITS),
    "input_c": random(1, BATCH, UNITS),
    "params": random(4 * UNITS * (SIZE + UNITS) + 8 * UNITS),
    "sequence_lengths": tensor(LENGTHS, np.int32),
}


class Rewriting:
    """Memory of a client with a call in it, whose sequence lengths it rewrites when it is told to."""

    def __init__(self, client: FrameClient, lengths: int) -> None:
        self._client = client
        self._other = lengths
        self._memory: mmap.mmap = with_region(client, 8 * PAGE)
        self._offset = 0
        self.num_rewritten = 0

    def call(self, method: str, request: Any, response: type[MessageT]) -> MessageT:
        moved, payload = move_contents(request)
        self._memory[: len(payload)] = payload
        self._offset = moved.sequence_lengths.payload_offset
        segments = [Segment(0, len(payload), 1, 0)]
        self._client.call(f"GradientOpsService.{method}", moved, segments=segments)
        return self._client.answer(response)[0]

    def rewrite(self) -> None:
        np.frombuffer(self._memory, np.int32, BATCH, self._offset)[:] = self._other
        self.num_rewritten += 1


def same(given: tensor_pb2.Tensor, expected: tensor_pb2.Tensor) -> None:
    """Checks that two tensors agree but for rounding: NumPy computes until the kernels are loaded."""
    ours, theirs = (np.frombuffer(each.content, np.float32) for each in (given, expected))
    assert ours.size
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def before(function: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        event()
        return function(*args)

    return called


def after(function: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        result = function(*args)
        event()
        return result

    return called


@pytest.mark.parametrize("other", list(OTHER_LENGTHS.values()), ids=list(OTHER_LENGTHS))
@pytest.mark.parametrize("moment", ["before they are checked", "between check and use"])
def test_the_lengths_of_a_call_stay_what_they_were(
    connect_unix: Connect, raw: RawCalls, monkeypatch: pytest.MonkeyPatch, moment: str, other: int
) -> None:
    forward = rnn_pb2.CudnnRNNRequest(**FORWARD)
    expected = raw.call("CudnnRNN", forward)
    backprop = rnn_pb2.CudnnRNNBackpropRequest(
        **FORWARD,
        output=expected.output,
        output_h=expected.output_h,
        output_c=expected.output_c,
        output_backprop=random(STEPS, BATCH, UNITS),
        output_h_backprop=random(1, BATCH, UNITS),
        output_c_backprop=random(1, BATCH, UNITS),
        reserve_space=expected.reserve_space,
    )
    expected_gradients = raw.call("CudnnRNNBackprop", backprop)
    with connect_unix() as client:
        memory = Rewriting(client, other)
        if moment == "before they are checked":
            for name in ("forward", "backprop"):
                monkeypatch.setattr(CpuCudnnRnn, name, before(getattr(CpuCudnnRnn, name), memory.rewrite))
        else:
            monkeypatch.setattr(family, "_lengths", after(family._lengths, memory.rewrite))
        outputs = memory.call("CudnnRNN", forward, rnn_pb2.CudnnRNNResponse)
        gradients = memory.call("CudnnRNNBackprop", backprop, rnn_pb2.CudnnRNNBackpropResponse)
        assert memory.num_rewritten == 2
    for name in ("output", "output_h", "output_c"):
        same(getattr(outputs, name), getattr(expected, name))
    for field in expected_gradients.DESCRIPTOR.fields:
        same(getattr(gradients, field.name), getattr(expected_gradients, field.name))
