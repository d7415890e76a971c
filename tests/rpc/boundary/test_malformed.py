"""Messages that are not valid protobuf are refused, whether one or in a stream."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve.v1 import server_messages_pb2, tensor_messages_pb2
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.chain import Call, chained
from gradserve_server.rpc.boundary.interceptors import RefuseMalformed
from gradserve_server.rpc.boundary.messages import tolerant
from tests.servers.raw_calls import METHODS

MALFORMED = b"\xff\xff"
SAYS = "the message is not valid protobuf of the expected type"


async def test_one_message() -> None:
    async def echo(request: Any, call: Call) -> Any:
        return request

    method = METHODS["GetServerInfo"]
    handle = chained((RefuseMalformed(),), method, echo)
    decode = tolerant(server_messages_pb2.GetServerInfoRequest.FromString)
    assert await handle(decode(b""), Call(method.full_name)) == server_messages_pb2.GetServerInfoRequest()
    with pytest.raises(InvalidArgumentError, match=SAYS):
        await handle(decode(MALFORMED), Call(method.full_name))


async def test_one_of_a_stream() -> None:
    taken: list[Any] = []

    async def take_all(requests: AsyncIterator[Any], call: Call) -> None:
        async for request in requests:
            taken.append(request)  # noqa: PERF401

    decode = tolerant(tensor_messages_pb2.PutTensorsRequest.FromString)

    async def requests() -> AsyncIterator[Any]:
        for message in (b"", b"", MALFORMED, b""):
            yield decode(message)

    method = METHODS["PutTensors"]
    with pytest.raises(InvalidArgumentError, match=SAYS):
        await chained((RefuseMalformed(),), method, take_all)(requests(), Call(method.full_name))
    assert taken == [tensor_messages_pb2.PutTensorsRequest()] * 2


def test_other_errors_of_a_decoder_are_not_hidden() -> None:
    def broken(message: bytes) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tolerant(broken)(b"")
