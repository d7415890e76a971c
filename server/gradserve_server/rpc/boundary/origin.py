"""Where a call came from."""

from collections.abc import Mapping

from gradserve_server.observe.call_record import Origin
from gradserve_server.rpc.boundary.status import Context

_HEADER = "x-request-id"


def origin_of(context: Context) -> Origin:
    """Returns the peer of a call, and the id in its metadata."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return origin(context.peer(), metadata)


def origin(peer: str, metadata: Mapping[str, str]) -> Origin:
    """Returns the origin of a call with this metadata."""
    return Origin(peer, metadata.get(_HEADER, ""), metadata)
