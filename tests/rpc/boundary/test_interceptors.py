"""The interceptors: admission, faults of the server, and malformed messages."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2
from gradserve_server.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.rpc.boundary.chain import Call, chained
from gradserve_server.rpc.boundary.interceptors import Admission, Faults, ReadableRequests
from gradserve_server.rpc.boundary.messages import tolerant
from tests.servers.raw_calls import METHODS

METHOD = METHODS["GetServerInfo"]


async def test_calls_are_admitted_only_until_it_closes() -> None:
    answered: list[str] = []

    async def answer(request: str, call: Call) -> None:
        answered.append(request)

    admission = Admission()
    handle = chained((admission,), METHOD, answer)
    await handle("before", Call(METHOD.full_name))
    admission.close()
    assert not admission.is_open
    with pytest.raises(UnavailableError, match="the server is shutting down"):
        await handle("after", Call(METHOD.full_name))
    assert answered == ["before"]


HIDDEN = "internal error; the server's log has the details"


async def run(error: BaseException, faults: Faults | None = None) -> None:
    async def answer(request: Any, call: Call) -> None:
        raise error

    await chained((faults or Faults(),), METHOD, answer)(None, Call(METHOD.full_name))


@pytest.mark.parametrize(
    ("error", "seen", "message", "is_logged"),
    [
        (NotFoundError("gone", field="handle"), NotFoundError, "gone", False),
        (InternalError("cudnnCreate failed"), InternalError, "cudnnCreate failed", True),
        (MemoryError("secret"), ResourceExhaustedError, "the server has no memory left for this call", True),
        (ValueError("secret"), InternalError, HIDDEN, True),
        (TimeoutError("secret"), InternalError, HIDDEN, True),
    ],
    ids=["expected", "a library", "memory", "a bug", "a timeout"],
)
async def test_only_domain_errors_leave_the_chain(
    error: Exception, seen: type[ServiceError], message: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(seen) as raised:
        await run(error)
    assert type(raised.value) is seen
    assert raised.value.message == message
    assert raised.value.field == getattr(error, "field", None)
    assert [(record.levelno, record.exc_info is not None) for record in caplog.records] == (
        [(logging.ERROR, True)] if is_logged else []
    )
    if is_logged:
        assert METHOD.full_name in caplog.text


async def test_a_cancelled_call_stays_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError):
        await run(asyncio.CancelledError())
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "num_faults"),
    [(NotFoundError("gone"), 0), (MemoryError(), 0), (InternalError("cuDNN failed"), 1), (RuntimeError("CUDA"), 1)],
    ids=["expected", "memory", "a library", "a bug"],
)
async def test_what_is_told_of_faults(error: Exception, num_faults: int) -> None:
    told: list[None] = []
    with pytest.raises(ServiceError):
        await run(error, Faults(lambda: told.append(None)))
    assert len(told) == num_faults


MALFORMED = b"\xff\xff"


SAYS = "the message is not valid protobuf of the expected type"


async def test_one_malformed_message() -> None:
    async def echo(request: Any, call: Call) -> Any:
        return request

    method = METHODS["GetServerInfo"]
    handle = chained((ReadableRequests(),), method, echo)
    decode = tolerant(server_messages_pb2.GetServerInfoRequest.FromString)
    assert await handle(decode(b""), Call(method.full_name)) == server_messages_pb2.GetServerInfoRequest()
    with pytest.raises(InvalidArgumentError, match=SAYS):
        await handle(decode(MALFORMED), Call(method.full_name))


async def test_one_malformed_message_of_a_stream() -> None:
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
        await chained((ReadableRequests(),), method, take_all)(requests(), Call(method.full_name))
    assert taken == [tensor_messages_pb2.PutTensorsRequest()] * 2


def test_other_errors_of_a_decoder_are_not_hidden() -> None:
    def broken(message: bytes) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tolerant(broken)(b"")
