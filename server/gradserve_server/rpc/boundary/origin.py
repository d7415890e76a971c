"""Where a call over gRPC came from."""

from gradserve_server.observe.call_record import Origin
from gradserve_server.rpc.boundary.status import Context

_HEADER = "x-request-id"


def origin_of(context: Context) -> Origin:
    """Returns the peer of a call, and the id in its metadata."""
    given = [value for key, value in context.invocation_metadata() or () if key == _HEADER and isinstance(value, str)]
    return Origin(context.peer(), given[0] if given else "")
