"""Requests of very many small parts are refused before they take a multiple of their length."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from gradserve_protocol.tensors import Contents, varint
from gradserve_protocol.v1 import accumulator_messages_pb2, tensor_messages_pb2, tensor_pb2
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.messages import MAX_PARTS, UNCHECKED_BYTES, PartCounter
from gradserve_testing import LocalServer
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.raw_calls import RawCalls

APPLY = accumulator_messages_pb2.ApplyGradientRequest
STORE = tensor_messages_pb2.StoreTensorsRequest
TOO_MANY = f"the message has more than {MAX_PARTS} parts"
FEW = 4000
"""The most parts in tests without a server."""


def number_of(message: Any, field: str) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number


def within(number: int, inner: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(inner)) + inner


TENSORS, GRADIENT = number_of(STORE, "tensors"), number_of(APPLY, "gradient")
SHAPE = number_of(tensor_pb2.Tensor, "shape")
EMPTY = within(TENSORS, b"")
EMPTIES = EMPTY * (FEW + 1)
DENSE_OR_SPARSE = within(2, b"") + within(3, b"")

TOO_DENSE: dict[str, tuple[Any, bytes]] = {
    "empty messages": (STORE, EMPTIES),
    "empty messages, and then garbage": (STORE, EMPTIES + b"\xff"),
    "empty messages, and then the beginning of a message": (STORE, EMPTIES + EMPTY[:1]),
    "one of two messages, again and again": (APPLY, within(GRADIENT, DENSE_OR_SPARSE * (FEW // 2 + 1))),
    "numbers": (STORE, within(TENSORS, within(SHAPE, b"\1" * FEW))),
    "numbers in many long lists": (STORE, within(TENSORS, within(SHAPE, b"\1" * 1100)) * (FEW // 1100 + 1)),
    "numbers in many lists": (STORE, within(TENSORS, within(SHAPE, b"\1" * 1000)) * (FEW // 125 + 1)),
    "numbers in many short messages": (
        STORE,
        within(TENSORS, within(SHAPE, b"\1" * 62)) * (FEW // 8 + 1),
    ),
    "numbers one by one": (STORE, within(TENSORS, (varint(SHAPE << 3) + b"\1") * FEW)),
    "unknown fields": (STORE, (varint(999 << 3) + b"\1") * (FEW + 1)),
    "a group": (STORE, varint(999 << 3 | 3) + b"\1" * FEW),
}


@pytest.mark.parametrize("name", TOO_DENSE)
async def test_too_many_parts(name: str) -> None:
    message, data = TOO_DENSE[name]
    with pytest.raises(InvalidArgumentError, match="the message has more than 4000 parts"):
        await PartCounter(message.DESCRIPTOR, unchecked_bytes=FEW // 2, max_parts=FEW).check(data)


def of_sparse_components(count: int) -> bytes:
    request = APPLY()
    for number in range(count):
        gradient = request.gradient.add(name=f"a component {number}")
        gradient.sparse.indices.CopyFrom(tensor_pb2.Tensor(shape=[2], content=bytes(16)))
        gradient.sparse.values.CopyFrom(tensor_pb2.Tensor(shape=[2, 10], content=bytes(80)))
        gradient.sparse.dense_shape.dims.extend([100, 10])
    return request.SerializeToString()


LEGAL: dict[str, tuple[Any, bytes]] = {
    "few parts": (STORE, b""),
    "one large tensor": (STORE, STORE(tensors=[tensor_pb2.Tensor(content=bytes(4 << 20))]).SerializeToString()),
    "a large unknown field": (STORE, within(999, EMPTY * (UNCHECKED_BYTES + 1))),
    "a tensor that ends too early": (STORE, within(TENSORS, bytes(2 << 20))[:-1]),
    "as many components as there may be": (APPLY, of_sparse_components(16) * (1 << 12)),
}


@pytest.mark.parametrize("name", LEGAL)
async def test_not_too_many_parts(name: str) -> None:
    message, data = LEGAL[name]
    await PartCounter(message.DESCRIPTOR).check(data)
    if name == "a tensor that ends too early":
        with pytest.raises(DecodeError):
            message.FromString(data)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=RuntimeConfig(warm_up=False))) as local:
        yield local


def test_over_grpc(local: LocalServer) -> None:
    with RawCalls(local.address) as raw:
        failure = raw.fail("StoreTensors", EMPTY * (MAX_PARTS + 1))
    assert (failure.code.name, failure.message) == ("INVALID_ARGUMENT", TOO_MANY)


def test_over_a_socket(local: LocalServer) -> None:
    contents = Contents()
    contents.tensor(np.zeros(1 << 20, np.uint8))
    with FrameClient.over_tcp(issue_ticket(local.address)) as client:
        client.hello(issue_ticket(local.address).ticket)
        for _ in range(2):  # the payload of the first is not in the way of the second
            client.call("TensorService.StoreTensors", STORE.FromString(EMPTY * (MAX_PARTS + 1)), contents)
            assert client.receive().status.message == TOO_MANY
