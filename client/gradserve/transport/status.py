"""Converts gRPC statuses to exceptions."""

import re
from collections.abc import Iterable

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from gradserve.transport.route import Route
from gradserve_protocol.errors import (
    CODE_NAMES,
    AbortedError,
    GradserveError,
    InternalError,
    LostError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_protocol.troubleshooting import DOMAIN, is_code

ERRORS: dict[grpc.StatusCode, type[GradserveError]] = {
    **{grpc.StatusCode[name]: error for error, name in CODE_NAMES.items()},
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.UNKNOWN: InternalError,
    grpc.StatusCode.FAILED_PRECONDITION: AbortedError,
    grpc.StatusCode.DATA_LOSS: InternalError,
}

_NO_CONNECTION = ("failed to connect", "errors resolving", "DNS resolution failed")
"""The beginnings of gRPC's own messages when no server answered."""

_NOT_RESOLVED = re.compile("errors resolving|DNS resolution failed")

_NOBODY_LISTENS = ("Connection refused", "No such file or directory")
"""The system's errors for an address at which a server may still be starting: a port, and a Unix socket."""
_NOT_ACCEPTED = re.compile("CERTIFICATE_VERIFY_FAILED(?:: (.*?))?(?:: OK)?$")
_CUT_OFF = ("Socket closed", "Connection reset", "Broken pipe", "EOF")
"""Words of gRPC's messages when the server ends a connection before it has answered anything."""


def explain(
    code: grpc.StatusCode, message: str | None, route: Route, *, is_encrypted: bool
) -> tuple[str | None, str | None]:
    """Returns the message of a failed call, and the error's code if there was no connection, which gRPC's words tell.

    Without a connection, the message says what to check.
    """
    if code is not grpc.StatusCode.UNAVAILABLE or not message:
        return message, None
    found = None
    if message.startswith(_NO_CONNECTION):
        advice = _about_tls(message, route) if is_encrypted else _about_no_tls(message, route)
        found = "GS_TLS" if advice else "GS_DNS" if _NOT_RESOLVED.search(message) else "GS_NO_CONNECTION"
        advice = advice or f"is gradserve serve running at {route.address}?"
        message = f"no connection: {advice} ({message})"
    return (f"{message}; the connection goes through the proxy of {route.proxy}" if route.proxy else message), found


def may_pass(message: str | None) -> bool:
    """Returns False if there was no connection, and waiting rarely mends that: no such host, or another certificate.

    Args:
        message: gRPC's message of a call that failed as UNAVAILABLE.
    """
    if not message or not message.startswith(_NO_CONNECTION):
        return True  # somebody has answered
    return any(each in message for each in _NOBODY_LISTENS)


def _about_tls(message: str, route: Route) -> str:
    """Returns why an encrypted connection may have failed, or nothing."""
    if "WRONG_VERSION_NUMBER" in message:
        return f"the server at {route.address} does not use TLS: connect without tls="
    if "Hostname Verification" in message:
        return f"the certificate of the server is not valid for {route.address.host}"
    if refusal := _NOT_ACCEPTED.search(message):
        return f"the certificate of the server at {route.address} is not accepted: {refusal[1] or 'not verified'}"
    if any(each in message for each in _CUT_OFF):
        return (
            f"the server at {route.address} has closed the connection, as one does that asks for the certificate of a "
            "client and gets none that it accepts: connect with tls=gradserve.TLS(ca=..., certificate=..., key=...)"
        )
    return ""


def _about_no_tls(message: str, route: Route) -> str:
    """Returns why a connection may have failed that is not encrypted, or nothing."""
    if not route.address.path and any(each in message for each in _CUT_OFF):
        return (
            f"the server at {route.address} has closed the connection, as one does that uses TLS: connect with "
            "tls=gradserve.TLS(ca=...)"
        )
    return ""


def error_from_status(
    code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> GradserveError:
    """Returns the exception for a failed call that this client did not cancel."""
    details = b""
    for key, value in trailers or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            details = value
    return _error(code, message, details)


def error_from_reply(code: grpc.StatusCode, status: status_pb2.Status) -> GradserveError:
    """Returns the exception for a call that failed on a socket."""
    return _error(code, status.message, status.SerializeToString())


def _error(code: grpc.StatusCode, message: str | None, details: bytes) -> GradserveError:
    field, retry_after, fine_code = _violated_field(details), _retry_after(details), _fine_code(details)
    if code is grpc.StatusCode.CANCELLED:
        fine_code = fine_code or "GS_CONNECTION_LOST"
        message = f"the server stopped, or something on the way to it ended the call: {message or code.name}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = f"{message or code.name}; this client is gradserve {_version()}"
    # An aggregator says so of the servers upstream; its clients see for themselves what it has lost.
    kind = LostError if fine_code == LostError.code else ERRORS.get(code, InternalError)
    error = kind(message or code.name, field=field)
    if isinstance(error, ResourceExhaustedError):
        error.retry_after = retry_after
    if fine_code is not None:
        error.code = fine_code
    return error


def _version() -> str:
    import gradserve  # which imports this module

    return gradserve.__version__


def _violated_field(details: bytes) -> str | None:
    violation = error_details_pb2.BadRequest()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(violation) and violation.field_violations:
                return str(violation.field_violations[0].field)
    except DecodeError:
        return None
    return None


def _fine_code(details: bytes) -> str | None:
    """Returns the code that the server has sent, which a later version may have introduced."""
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info) and info.domain == DOMAIN and is_code(info.reason):
                return str(info.reason)
    except DecodeError:
        return None
    return None


def _retry_after(details: bytes) -> float | None:
    retry = error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(retry):
                return float(max(retry.retry_delay.ToNanoseconds(), 0) * 1e-9)
    except (DecodeError, ValueError):
        return None
    return None
