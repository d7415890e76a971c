"""What a cluster is to be. Does not import Ray."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster that is to run.

    Attributes:
        name: Its name.
        servers: The number of servers.
        cpus: The CPUs of Ray that each of them reserves.
        gpus: The GPUs that each has.
        state_dir: The folder of their state directories; None for servers that are not durable.
        flags: Further flags of `gradserve serve`.
        timeout: Seconds that starting may take.
        id: Tells this cluster from others that use the same state directories before and after it.
    """

    name: str
    servers: int
    cpus: float
    gpus: float
    state_dir: Path | None
    flags: tuple[str, ...]
    timeout: float
    id: str = field(default_factory=lambda: secrets.token_hex(16))
