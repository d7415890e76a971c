"""Errors of the server upstream, as this server's own."""

import gradserve.errors as client
import gradserve_server.errors as server

_SAME: dict[type[client.GradserveError], type[server.ServiceError]] = {
    client.InvalidArgumentError: server.InvalidArgumentError,
    client.NotFoundError: server.NotFoundError,
    client.AlreadyExistsError: server.AlreadyExistsError,
    client.AbortedError: server.AbortedError,
    client.OutOfRangeError: server.OutOfRangeError,
    client.DeadlineExceededError: server.DeadlineExceededError,
}


def served(error: client.GradserveError) -> server.ServiceError:
    """Returns an error of a call upstream for the caller here.

    What it says of the call stays as it is. What it says of the connection upstream is no matter of the caller's: it
    is not the caller's token that was refused.
    """
    if isinstance(error, client.ResourceExhaustedError):
        return server.ResourceExhaustedError(error.message, field=error.field, retry_after=error.retry_after)
    for kind, same in _SAME.items():
        if isinstance(error, kind):
            return same(error.message, field=error.field)
    message = f"the server upstream: {error.message}"
    if isinstance(error, client.UnauthenticatedError | client.PermissionDeniedError):
        return server.PermissionDeniedError(f"{message}. Its token or certificate is that of the aggregator")
    if isinstance(error, client.UnavailableError | client.CallCancelledError):
        return server.UnavailableError(message)
    return server.InternalError(message)
