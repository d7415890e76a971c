"""Clients that are killed in the middle of a round: the round stays exact, and nothing of them is left."""

import subprocess

import numpy as np
import pytest
from google.protobuf.message import Message

from gradserve_protocol.frames import FrameHeader, FrameKind
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import Connect
from tests.rpc.sockets.test_regions import make_accumulator
from tests.servers.polling import eventually
from tests.servers.processes import ended
from tests.servers.raw_calls import RawCalls

SIZE = 1024


def push_pull(reference: accumulator_pb2.AccumulatorRef, value: float) -> Message:
    part = accumulator_pb2.ComponentGradient(dense=Contents().tensor(np.full(SIZE, value, np.float32)))
    return accumulator_messages_pb2.PushPullRequest(accumulator=reference, gradient=[part], num_required=2)


def frame_of(request: Message) -> bytes:
    name, message = b"gradserve.v1.AccumulatorService.PushPull", request.SerializeToString()
    return FrameHeader(FrameKind.CALL, name_bytes=len(name), message_bytes=len(message)).pack() + name + message


@pytest.mark.parametrize("stage", ["idle", "in a header", "in a message", "waiting"])
def test_a_process_is_killed(connect: Connect, server: LocalServer, raw: RawCalls, name: str, stage: str) -> None:
    reference = make_accumulator(raw, name, sparse=False)
    data = frame_of(push_pull(reference, 4))
    client = connect()
    with ended(subprocess.Popen(["sleep", "600"], pass_fds=[client.sock.fileno()])):
        client.sock.sendall(data[: {"idle": 0, "in a header": 9, "in a message": 500, "waiting": len(data)}[stage]])
        if stage == "waiting":
            eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (1).__eq__)
        client.sock.close()  # from now on the other process is the only owner
    eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (0).__eq__)
    # What waited had counted already: one more gradient ends its round.
    with connect() as first, connect() as second:
        others = {first: 0} if stage == "waiting" else {first: 1, second: 3}
        for other, value in others.items():
            other.sock.sendall(frame_of(push_pull(reference, value)))
        for other in others:
            answer, _ = other.answer(accumulator_messages_pb2.PushPullResponse)
            (part,) = answer.average.components
            assert np.frombuffer(part.dense.content, np.float32).tolist() == [2] * SIZE
    raw.call("DeleteAccumulator", accumulator_messages_pb2.DeleteAccumulatorRequest(accumulator=reference))
