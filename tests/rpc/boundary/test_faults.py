"""Nothing but domain errors leaves the chain; what is a fault of the server's is in its log."""

import asyncio
import logging
from typing import Any

import pytest

from gradserve_server.errors import InternalError, NotFoundError, ResourceExhaustedError, ServiceError
from gradserve_server.rpc.boundary.chain import Call, chained
from gradserve_server.rpc.boundary.interceptors import Faults
from tests.servers.raw_calls import METHODS

METHOD = METHODS["GetServerInfo"]
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
async def test_errors(
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
