"""What a client learns of restarts of the server."""

from gradserve.errors import GradserveError

_FIELD = "accumulator.server_incarnation"


def is_of_another_run(error: GradserveError) -> bool:
    """Returns True if a server refused a call because it was for an earlier run of it."""
    return error.field == _FIELD
