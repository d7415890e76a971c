"""The descriptors of this process: how many connections there may be, so that some are left for everything else."""

import logging
import resource

from gradserve_server.config import LimitsConfig
from gradserve_server.rpc.listeners.sockets.client_regions import max_regions

_log = logging.getLogger(__name__)

RESERVED = 400
"""For files of the state, logs, certificates, listeners, the HTTP port, and whatever libraries open."""
_LEAST_CONNECTIONS = 16


def within_descriptors(limits: LimitsConfig, num_addresses: int) -> LimitsConfig:
    """Returns limits under which clients cannot take all descriptors; the same ones if there are enough of them.

    Args:
        limits: The limits that are wanted.
        num_addresses: The number of addresses of gRPC, to each of which there may be `max_connections`. As many may be
            to sockets, and as many again are strands of these.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return limits
    room = (descriptors - max_regions() - RESERVED) // (num_addresses + 2)
    allowed = max(room, _LEAST_CONNECTIONS)
    if limits.max_connections <= allowed:
        return limits
    was_given = "max_connections" in limits.model_fields_set
    _log.log(
        logging.WARNING if was_given else logging.DEBUG,
        "max_connections is %d, not %d: this process may open %d files (ulimit -n)",
        allowed,
        limits.max_connections,
        descriptors,
    )
    return limits.model_copy(update={"max_connections": allowed})
