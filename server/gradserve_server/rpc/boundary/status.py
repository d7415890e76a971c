"""The status codes of domain errors, and the statuses that tell clients of them."""

from google.rpc import code_pb2, error_details_pb2, status_pb2

from gradserve_protocol.troubleshooting import DOMAIN
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
    UnimplementedError,
)

STATUS_CODES: dict[type[ServiceError], str] = {
    InvalidArgumentError: "INVALID_ARGUMENT",
    NotFoundError: "NOT_FOUND",
    AlreadyExistsError: "ALREADY_EXISTS",
    AbortedError: "ABORTED",
    OutOfRangeError: "OUT_OF_RANGE",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    ResourceExhaustedError: "RESOURCE_EXHAUSTED",
    UnavailableError: "UNAVAILABLE",
    UnauthenticatedError: "UNAUTHENTICATED",
    PermissionDeniedError: "PERMISSION_DENIED",
    UnimplementedError: "UNIMPLEMENTED",
    InternalError: "INTERNAL",
}
"""The name of each error's status code; see `status_code`."""

_MAX_MESSAGE_BYTES = 2000
"""The longest message. Peers end connections over headers of more than 8 KiB, and details repeat the message twice."""


def status_code(error: ServiceError) -> str:
    """Returns the name of an error's status code: that of its class, or of the nearest base class that has one."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


def status_message(error: ServiceError) -> status_pb2.Status:
    """Returns the status of an error; its details name the field, the code, and the time to wait before a retry."""
    status = status_pb2.Status(code=code_pb2.Code.Value(status_code(error)), message=_shortened(error.message))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field), description=status.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code is not None:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN))
    if isinstance(error, ResourceExhaustedError) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


def unimplemented(message: str) -> status_pb2.Status:
    """Returns the status of a call to a method that does not exist."""
    return status_pb2.Status(code=code_pb2.UNIMPLEMENTED, message=message)


def _shortened(message: str) -> str:
    """Shortens a message, which may name thousands of workers, to fit into a header once it is percent-encoded."""
    num_bytes = 0
    for index, character in enumerate(message):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode())
        if num_bytes > _MAX_MESSAGE_BYTES:
            return message[:index] + " ..."
    return message
