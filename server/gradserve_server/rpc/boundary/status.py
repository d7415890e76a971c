"""Domain errors as gRPC statuses: the one place that knows both."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2

from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

STATUS_CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    AbortedError: grpc.StatusCode.ABORTED,
    OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}

_DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_BYTES = 2000
"""Peers break off connections over headers of more than 8 KiB in all, and details repeat the message twice."""

Trailers = tuple[tuple[str, str | bytes], ...]
Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def status_boundary(method: str, context: Context) -> AsyncIterator[None]:
    """Turns what is raised inside into the status of the call."""
    try:
        yield
    except ServiceError as error:
        if isinstance(error, InternalError):
            _log.exception("%s failed", method)
        await _abort(context, error)
    except MemoryError:
        _log.exception("%s ran out of memory", method)
        await _abort(context, ResourceExhaustedError("the server has no memory left for this call"))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        # Nothing can be sent any more.
        _log.debug("the client of %s left while it was answered", method)
        raise asyncio.CancelledError from None
    except Exception:
        _log.exception("%s failed", method)
        await _end(context, grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


async def _abort(context: Context, error: ServiceError) -> None:
    message = _cut(error.message)
    code = STATUS_CODES[type(error)]
    await _end(context, code, message, _details(code, message, error.field))


def _cut(message: str) -> str:
    """Shortens a message, which may name thousands of workers, to what fits into a header, percent-encoded."""
    num_bytes = 0
    for index, character in enumerate(message):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode())
        if num_bytes > _MAX_MESSAGE_BYTES:
            return message[:index] + " ..."
    return message


async def _end(context: Context, code: grpc.StatusCode, message: str, trailers: Trailers = ()) -> None:
    aborting: Awaitable[NoReturn] = context.abort(code, message, trailers)
    try:
        await aborting
    except grpc.aio.AbortError as aborted:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_release_frames, aborted))
        raise
    except grpc.aio.InternalError:
        _log.debug("a client left before it learned of %s: %s", code.name, message)
        raise asyncio.CancelledError from None


def _release_frames(aborted: grpc.aio.AbortError, _done: object) -> None:
    """Lets go of the request and of what was made of it.

    gRPC keeps the exception in the state of the call, to which its frames refer: memory of any size would wait
    for the garbage collector to find that cycle.
    """
    aborted.__traceback__ = aborted.__context__ = None


def _details(code: grpc.StatusCode, message: str, field: str | None) -> Trailers:
    if field is None:
        return ()
    status = status_pb2.Status(code=code.value[0], message=message)
    violation = error_details_pb2.BadRequest.FieldViolation(field=_cut(field), description=message)
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return ((_DETAILS_KEY, status.SerializeToString()),)
