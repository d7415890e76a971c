"""The time for which a call may wait."""

from typing import Any

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.durations import decode_duration

_MAX_MARGIN_SECONDS = 0.2


def wait_timeout(request: Any, call: Call) -> float | None:
    """Returns the seconds for which a call may wait, None for no limit.

    That is the request's own `timeout`, but a little less than the call's deadline: an answer or a diagnosis that is
    under way when the deadline passes does not arrive.

    Raises:
        InvalidArgumentError: `timeout` is negative.
    """
    timeout = decode_duration(request, "timeout")
    if timeout is not None and timeout < 0:
        raise InvalidArgumentError(f"expected a timeout of at least 0, got {timeout:g} s", field="timeout")
    remaining = call.time_left()
    if remaining is None:
        return timeout
    within = max(remaining - min(_MAX_MARGIN_SECONDS, remaining / 10), 0.0)
    return within if timeout is None else min(timeout, within)
