"""The errors of requests, as the domain sees them.

    ServiceError
    ├── InvalidArgumentError     the request can never succeed as it is
    ├── NotFoundError            the handle, accumulator or layer does not exist
    ├── AlreadyExistsError       the name is taken by something else
    ├── AbortedError             the state the call depended on is gone
    ├── OutOfRangeError          the requested step is not available
    ├── DeadlineExceededError    the call reached its time limit
    ├── ResourceExhaustedError   a limit was reached
    ├── UnavailableError         the server is shutting down
    ├── UnauthenticatedError     the caller showed no credentials, or unknown ones
    ├── PermissionDeniedError    the caller's role is too low
    ├── UnimplementedError       this server does not do that
    └── InternalError            a library of the server failed

`gradserve_server.rpc.boundary.status` maps each error to a gRPC status code.
"""

from collections.abc import Callable, Mapping


class ServiceError(Exception):
    """The base class of errors of requests. The message is for the sender of the request.

    Attributes:
        message: What was wrong, what was given and what was expected.
        field: The field of the request that was wrong, e.g. "gradient[0].dense.shape", or None.
        code: The code of `gradserve_protocol.troubleshooting` that says more than the error's class; None for none.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


class InvalidArgumentError(ServiceError):
    """The request can never succeed as it is."""


class NotFoundError(ServiceError):
    """The handle, accumulator or layer does not exist.

    Attributes:
        is_awaited: Whether the caller makes it now, and only wanted to know: neither log nor status shows this error.
    """

    is_awaited = False


class AlreadyExistsError(ServiceError):
    """The name is taken by something else."""


class AbortedError(ServiceError):
    """The state the call depended on is gone.

    Attributes:
        caller_left: Whether that is what was in the memory of the caller, who has given up the call. The same call may
            succeed when it is sent again.
    """

    def __init__(
        self, message: str, *, field: str | None = None, caller_left: bool = False, code: str | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.caller_left = caller_left


class OutOfRangeError(ServiceError):
    """The requested step is not available."""


class DeadlineExceededError(ServiceError):
    """The call reached its time limit."""


class ResourceExhaustedError(ServiceError):
    """A limit was reached.

    Attributes:
        retry_after: Seconds after which the same request may succeed; None if nothing is known of that.
    """

    def __init__(
        self, message: str, *, field: str | None = None, retry_after: float | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.retry_after = retry_after


class UnavailableError(ServiceError):
    """The server is shutting down."""


class UnauthenticatedError(ServiceError):
    """The caller showed no credentials, or unknown ones."""


class PermissionDeniedError(ServiceError):
    """The caller's role is too low."""


class UnimplementedError(ServiceError):
    """This server does not do that, as it is configured."""


class InternalError(ServiceError):
    """A library that the server relies on failed, or is missing."""


class request_fields:  # noqa: N801
    """Gives fields in errors of a block the paths of the request, where the domain has other names for them."""

    __slots__ = ("_paths",)

    def __init__(self, paths: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> None:
        self._paths = paths

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Changes the field of an error."""
        if not isinstance(error, ServiceError) or error.field is None:
            return
        paths = self._paths() if callable(self._paths) else self._paths
        for name, path in paths.items():
            if error.field == name or error.field.startswith(f"{name}."):
                error.field = path + error.field.removeprefix(name)
                return
