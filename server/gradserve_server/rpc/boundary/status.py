"""Converts domain errors to gRPC statuses: the one module that knows both."""

import asyncio
import logging
from collections.abc import Awaitable
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
    PermissionDeniedError,
    ResourceExhaustedError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

STATUS_CODES: dict[type, grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    AbortedError: grpc.StatusCode.ABORTED,
    OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    InternalError: grpc.StatusCode.INTERNAL,
}
"""The codes of the kinds of errors; see `status_code`."""

_DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_BYTES = 2000
"""The longest message. Peers end connections over headers of more than 8 KiB, and details repeat the message twice."""

Trailers = tuple[tuple[str, str | bytes], ...]
Context = grpc.aio.ServicerContext[Any, Any]


def status_code(error: ServiceError) -> grpc.StatusCode:
    """Returns the code of an error: that of its class, or of the nearest base that has one."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


async def end_with(error: ServiceError, context: Context) -> NoReturn:
    """Ends a call with the status of an error."""
    status = status_message(error)
    code = status_code(error)
    aborting: Awaitable[NoReturn] = context.abort(code, status.message, _details(status))
    try:
        await aborting
    except grpc.aio.AbortError as aborted:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_release_frames, aborted))
        raise
    except grpc.aio.InternalError:
        _log.debug("a client left before it learned of %s: %s", code.name, status.message)
        raise asyncio.CancelledError from None


def status_message(error: ServiceError) -> status_pb2.Status:
    """Returns the status of an error as a message, with its field, and when to try again, as details."""
    status = status_pb2.Status(code=status_code(error).value[0], message=_cut(error.message))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_cut(error.field), description=status.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


def unimplemented(message: str) -> status_pb2.Status:
    """Returns the status of a call of a method that does not exist, as gRPC answers it by itself."""
    return status_pb2.Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message=message)


async def write(response: Any, method: str, context: Context) -> None:
    """Sends a response of a stream. If nothing can be sent any more, the call is cancelled."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        _log.debug("the client of %s left while it was answered", method)
        raise asyncio.CancelledError from None


def _cut(message: str) -> str:
    """Shortens a message, which may name thousands of workers, so that it fits into a header, percent-encoded."""
    num_bytes = 0
    for index, character in enumerate(message):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode())
        if num_bytes > _MAX_MESSAGE_BYTES:
            return message[:index] + " ..."
    return message


def _release_frames(aborted: grpc.aio.AbortError, _done: object) -> None:
    """Frees the request and everything made from it.

    gRPC keeps the exception in the state of the call, to which its frames refer. Without this, memory of any size would
    wait for the garbage collector to find the cycle.
    """
    aborted.__traceback__ = aborted.__context__ = None


def _details(status: status_pb2.Status) -> Trailers:
    return ((_DETAILS_KEY, status.SerializeToString()),) if status.details else ()
