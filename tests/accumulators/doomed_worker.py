"""A worker that comes to some stage of a round, says so, and stays there until it is killed."""

import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

import gradserve
from gradserve_protocol.frames import FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.sealed import make_region
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2, tensor_messages_pb2, tensor_pb2
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls

Way: TypeAlias = Literal["grpc", "bulk", "shared_memory"]

SIZE = 1 << 18
"""The elements of a gradient: 1 MiB, which no message carries."""
COMPONENT = "g"
VALUE = 4
"""The elements of a doomed worker's gradient."""


@dataclass(frozen=True)
class Round:
    """Where a worker works.

    Attributes:
        address: The server.
        way: How the worker reaches it.
        accumulator: The name of the accumulator.
        handle: A stored tensor of a gradient's size.
        there: Told when the worker is where it stays.
    """

    address: str
    way: Way
    accumulator: str
    handle: str
    there: Connection

    def stay(self, *_kept: object) -> NoReturn:
        """Says that the worker is there, and keeps things until the end."""
        self.there.send("there")
        while True:
            signal.pause()


def connected(work: Round) -> None:
    with joined(work) as client:
        client.server_info()
        work.stay()


def sending(work: Round) -> None:
    """Half of the gradient is on its way."""
    if work.way == "grpc":
        with RawCalls(work.address) as raw:
            raw.start_stream("PutTensors", half_an_upload(work)).result()
    with opened(work) as client:
        contents = Contents()
        part = accumulator_pb2.ComponentGradient(
            name=COMPONENT, dense=contents.tensor(np.full(SIZE, VALUE, np.float32))
        )
        request = accumulator_messages_pb2.ApplyGradientRequest(
            accumulator=accumulator_pb2.AccumulatorRef(name=work.accumulator), gradient=[part]
        )
        name, payload = b"gradserve.v1.AccumulatorService.ApplyGradient", b"".join(contents.pieces())
        frame, memory = call_frame(name, request.SerializeToString(), payload, work, client)
        client.sock.sendall(frame[: len(frame) // 2])
        work.stay(memory)


def applied(work: Round) -> None:
    with joined(work) as client:
        accumulator(client, work.accumulator).apply_grad(gradient(client))
        work.stay()


def waiting_for_all(work: Round) -> None:
    with joined(work) as client:
        acc = accumulator(client, work.accumulator)
        work.there.send("almost there")
        acc.push_pull(gradient(client), 2)


def taking(work: Round) -> None:
    with joined(work) as client:
        acc = accumulator(client, work.accumulator)
        work.there.send("almost there")
        acc.take_grad(2)


def receiving(work: Round) -> None:
    """The beginning of a result has come."""
    if work.way == "grpc":
        with RawCalls(work.address) as raw:
            replies = raw.start("GetTensors", tensor_messages_pb2.GetTensorsRequest(handles=[work.handle]))
            next(replies)
            work.stay()
    with opened(work) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.call("TensorService.ReadTensors", tensor_messages_pb2.ReadTensorsRequest(handles=[work.handle]))
        client.sock.recv(100)
        work.stay()


def reading(work: Round) -> None:
    """An average is being read: in place, where the way allows that."""
    with joined(work) as client:
        acc = accumulator(client, work.accumulator)
        acc.apply_grad(gradient(client))
        average = acc.take_grad(1, copy=False)
        work.stay(average)


STAGES: dict[str, Callable[[Round], None]] = {
    each.__name__: each for each in (connected, sending, applied, waiting_for_all, taking, receiving, reading)
}


def work_until_killed(stage: str, work: Round) -> None:
    """Comes to a stage, by the name of its function, and stays there."""
    STAGES[stage](work)


def joined(work: Round) -> gradserve.Client:
    return gradserve.connect(work.address, transport=work.way, timeout=PATIENCE_SECONDS)


def accumulator(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    """Returns the accumulator of a round."""
    return client.gradient_accumulator({COMPONENT: np.zeros(SIZE, np.float32)}, name)


def gradient(client: gradserve.Client) -> dict[str, Any]:
    array = client.empty(SIZE, "float32")
    array[:] = VALUE
    return {COMPONENT: array}


def half_an_upload(work: Round) -> Iterator[tensor_messages_pb2.PutTensorsRequest]:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[SIZE])
    header = tensor_messages_pb2.PutTensorsHeader(tensors=[spec])
    yield tensor_messages_pb2.PutTensorsRequest(header=header)
    yield tensor_messages_pb2.PutTensorsRequest(chunk=bytes(SIZE * 2))
    work.there.send("there")
    while True:
        signal.sigwait([])


def opened(work: Round) -> FrameClient:
    ticket = issue_ticket(work.address)
    client = FrameClient.over_tcp(ticket) if work.way == "bulk" else FrameClient.over_unix(ticket)
    assert client.hello(ticket.ticket).header.code == 0
    return client


def call_frame(name: bytes, message: bytes, payload: bytes, work: Round, client: FrameClient) -> tuple[bytes, object]:
    """Returns a call with a payload, which lies in a region where the way has them, and its memory."""
    sizes = {"name_bytes": len(name), "message_bytes": len(message)}
    if work.way == "bulk":
        return FrameHeader(FrameKind.CALL, payload_bytes=len(payload), **sizes).pack() + name + message + payload, None
    descriptor, memory = make_region(len(payload), read_only_for_others=False)
    memory[:] = payload
    client.send(FrameHeader(FrameKind.REGION, number=1, size=len(payload)), descriptors=[descriptor])
    assert client.receive().header.code == 0
    segments = pack_segments([Segment(0, len(payload), 1, 0)])
    return FrameHeader(FrameKind.CALL, size=1, **sizes).pack() + name + segments + message, memory
