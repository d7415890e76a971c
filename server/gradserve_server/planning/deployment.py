"""A training run as a plan describes it."""

import math
from dataclasses import dataclass

WIRE_EFFICIENCY = 0.95
"""The part of a link's bandwidth that is left for tensors by the headers of Ethernet, IP and TCP, in frames of 1500
bytes."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A training run: its workers, its servers, and the links between them.

    The model is in accumulators that are spread evenly over the servers. Links carry as much in one direction as in the
    other, at the same time.

    Attributes:
        model_bytes: The size of a gradient of the whole model.
        num_workers: The number of workers.
        num_required: The number of gradients in a round; fewer than workers if some are backups.
        num_servers: The number of servers.
        server_bandwidth: The bandwidth of each server's link, in bytes a second.
        worker_bandwidth: The bandwidth of each worker's link, in bytes a second; math.inf for no limit. With several
            workers on a host, that of the host's link.
        round_trip: The time of a round trip between workers and servers, in seconds.
        compute_seconds: The median time in which a worker computes a gradient.
        jitter: The standard deviation of the logarithm of that time: 0.1 means that one step in six takes 10 % longer.
        workers_per_host: The number of workers on each host, which share an aggregator there if there are several.
        grace: How long a gradient waits there for those of the other workers of the host, in seconds.
    """

    model_bytes: float
    num_workers: int
    num_required: int
    num_servers: int
    server_bandwidth: float
    worker_bandwidth: float = math.inf
    round_trip: float = 0.0
    compute_seconds: float = 0.0
    jitter: float = 0.0
    workers_per_host: int = 1
    grace: float = 1.0

    @property
    def part_bytes(self) -> float:
        """The size of the part of a gradient that each server gets."""
        return self.model_bytes / self.num_servers

    @property
    def capacity(self) -> float:
        """What a server's link carries of tensors, in bytes a second."""
        return self.server_bandwidth * WIRE_EFFICIENCY

    @property
    def transfer_limit(self) -> float:
        """What one transfer between a worker and a server can take of it: a worker talks to all servers at once."""
        return self.worker_bandwidth * WIRE_EFFICIENCY / self.num_servers
