"""The errors that calls raise; `gradserve.errors` draws their tree."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gradserve_protocol.printing import visible_lines

if TYPE_CHECKING:
    from gradserve.results import PushPullResult


class GradserveError(Exception):
    """The base class of all errors of calls.

    Attributes:
        message: What was wrong, in the server's words if it answered.
        code: A short code such as "GS_NO_SUCH_NAME", which `gradserve explain` takes: that of the class, unless the
            server or the client knows a finer one.
        field: The field of the request that was wrong, e.g. "gradient[0].dense.shape", or None. Of calls on parameters,
            the argument, and the component if it is about one: "update['w']", "max_staleness".
        request_id: The id of the apply, take or push_pull that failed, or None. Pass it to the same call to try again:
            the call then counts once, whatever became of the first attempt. An id that the client gave is a long
            integer, which names the call in every client; a number that the caller gave belongs to that one client.
    """

    code: str = "GS_ERROR"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.request_id: int | None = None
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Returns message and code for a terminal or a log: the message may have names and ids of others in it."""
        return f"{visible_lines(self.message)} [{self.code}]"


class InvalidArgumentError(GradserveError, ValueError):
    """The request can never succeed as it is."""

    code = "GS_INVALID_ARGUMENT"


class NotFoundError(GradserveError, KeyError):
    """The handle, accumulator, layer or parameters do not exist."""

    code = "GS_NOT_FOUND"


class AlreadyExistsError(GradserveError):
    """The name is taken by something else."""

    code = "GS_ALREADY_EXISTS"


class AbortedError(GradserveError):
    """The state the call depended on is gone: deleted, or too old to be remembered."""

    code = "GS_ABORTED"


class LostError(GradserveError):
    """The server was started again, and has lost what the message names.

    Raised once, by the next call, which the server has not carried out since it was started: make it again, with the
    error's `request_id` if it has one.

    Attributes:
        accumulator: The name of the accumulator or the parameters; empty if an aggregator has lost them upstream.
        num_gradients: The number of this client's gradients or updates that were accepted, and are lost.
    """

    code = "GS_LOST"

    def __init__(
        self, message: str, *, field: str | None = None, accumulator: str = "", num_gradients: int = 0
    ) -> None:
        super().__init__(message, field=field)
        self.accumulator = accumulator
        self.num_gradients = num_gradients


class NotDurableError(GradserveError):
    """The client was closed, and a crash of the server would lose gradients or updates that it had sent.

    Attributes:
        gradients: Their number, by the name of the accumulator or the parameters.
    """

    code = "GS_NOT_DURABLE"

    def __init__(self, message: str, *, field: str | None = None, gradients: Mapping[str, int] | None = None) -> None:
        super().__init__(message, field=field)
        self.gradients = dict(gradients or {})


class StaleGradientError(GradserveError):
    """The gradient of a push_pull was dropped, because it was computed at a step that is over.

    A late worker catches up by taking over the step and applying the average, or by reading its parameters again.

    Attributes:
        result: What `on_stale="return"` would have returned: the newest average kept, empty if there is none.
        global_step: The accumulator's step, which is the local_step of the next gradient.
    """

    code = "GS_STALE"

    def __init__(
        self, message: str, *, field: str | None = None, result: "PushPullResult | None" = None, global_step: int = 0
    ) -> None:
        super().__init__(message, field=field)
        self.result = result
        self.global_step = global_step


class OutOfRangeError(GradserveError, IndexError):
    """The requested step is not available: no longer kept, or skipped."""

    code = "GS_OUT_OF_RANGE"


class DeadlineExceededError(GradserveError, TimeoutError):
    """The call reached its time limit."""

    code = "GS_DEADLINE"


class ResourceExhaustedError(GradserveError):
    """A limit of the server was reached.

    Attributes:
        retry_after: Seconds after which the call may succeed, if the server has said so, otherwise None. The client has
            tried again by itself within the call's time limit.
    """

    code = "GS_LIMIT"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after: float | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.retry_after = retry_after


class UnavailableError(GradserveError, ConnectionError):
    """There is no server at the address, or it is shutting down.

    Attributes:
        may_pass: False if there was no connection for a reason that waiting rarely mends: no such host, or another
            certificate. The client then tries again for no longer than two seconds, unless the server has answered
            before.
        was_sent: False if there was no connection, so that the server cannot have seen the call. The client then tries
            again also if the call is one that must not be carried out twice.
    """

    code = "GS_UNAVAILABLE"

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, was_sent: bool = True
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.may_pass = True
        self.was_sent = was_sent


class UnauthenticatedError(GradserveError, PermissionError):
    """The credentials are missing or wrong."""

    code = "GS_UNAUTHENTICATED"


class PermissionDeniedError(GradserveError, PermissionError):
    """These credentials do not allow the call."""

    code = "GS_PERMISSION_DENIED"


class UnimplementedError(GradserveError):
    """The server does not know the call: it is older than this client."""

    code = "GS_UNIMPLEMENTED"


class CallCancelledError(GradserveError):
    """The client was closed during the call."""

    code = "GS_CANCELLED"


class InternalError(GradserveError):
    """A fault of the server; its log has the details."""

    code = "GS_INTERNAL"


class ForkedClientError(GradserveError, RuntimeError):
    """The client was connected before this process was forked; connect again after the fork."""

    code = "GS_FORKED"


CODE_NAMES: dict[type[GradserveError], str] = {
    AbortedError: "ABORTED",
    AlreadyExistsError: "ALREADY_EXISTS",
    CallCancelledError: "CANCELLED",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    InternalError: "INTERNAL",
    InvalidArgumentError: "INVALID_ARGUMENT",
    NotFoundError: "NOT_FOUND",
    OutOfRangeError: "OUT_OF_RANGE",
    PermissionDeniedError: "PERMISSION_DENIED",
    ResourceExhaustedError: "RESOURCE_EXHAUSTED",
    UnauthenticatedError: "UNAUTHENTICATED",
    UnavailableError: "UNAVAILABLE",
    UnimplementedError: "UNIMPLEMENTED",
}
"""The names of the status codes for which errors stand."""
