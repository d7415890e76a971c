"""What can go wrong with a request, in the words of the domain.

    ServiceError
    ├── InvalidArgumentError     the request can never succeed as it is
    ├── NotFoundError            no such handle or accumulator
    ├── AlreadyExistsError       the name is taken by something else
    ├── AbortedError             the state the call depended on is gone
    ├── OutOfRangeError          the requested step is not available
    ├── DeadlineExceededError    waited long enough
    ├── ResourceExhaustedError   a limit was reached
    ├── UnavailableError         shutting down
    └── InternalError            a library of the server's failed

`gradserve_server.rpc.boundary.status` gives each its gRPC status code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class ServiceError(Exception):
    """A request failed. The message is meant for whoever sent it.

    Attributes:
        message: What was wrong, what was given and what was expected.
        field: The field of the request that was wrong, e.g. "gradient[0].dense.shape", or None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidArgumentError(ServiceError):
    """The request can never succeed as it is."""


class NotFoundError(ServiceError):
    """No such handle or accumulator."""


class AlreadyExistsError(ServiceError):
    """The name is taken by something else."""


class AbortedError(ServiceError):
    """The state the call depended on is gone."""


class OutOfRangeError(ServiceError):
    """The requested step is not available."""


class DeadlineExceededError(ServiceError):
    """The call waited as long as it was allowed to."""


class ResourceExhaustedError(ServiceError):
    """A limit of the server was reached."""


class UnavailableError(ServiceError):
    """The server is shutting down."""


class InternalError(ServiceError):
    """A library that the server relies on failed, or is not there."""


@contextmanager
def request_fields(paths: Mapping[str, str]) -> Iterator[None]:
    """Names fields in errors as the request does, where the domain has other names for them.

    Args:
        paths: By the domain's name, which may be the beginning of a longer path.
    """
    try:
        yield
    except ServiceError as error:
        for name, path in paths.items():
            if error.field is not None and (error.field == name or error.field.startswith(f"{name}.")):
                error.field = path + error.field.removeprefix(name)
                break
        raise
