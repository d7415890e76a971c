"""The directory of a cluster: where its servers are. It runs in an actor of its own."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path


class ClusterError(Exception):
    """A cluster could not be started, found or ended; the message is for the user of the command."""


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


class Directory:
    """The servers of a cluster, in their order.

    The actors of the servers report every few seconds, so a directory that Ray has restarted soon knows all of them.
    Before they start their servers, the actors also report the cluster's size, which the state directory of server 0
    keeps.
    """

    def __init__(self, size: int, local_ray: LocalRay | None, plan: ClusterPlan | None = None) -> None:
        """Begins without addresses.

        Args:
            size: The number of servers.
            local_ray: The Ray that ends with its last cluster; None for one that others have started.
            plan: What the cluster was to be at its start; None if nobody will ask.
        """
        self._plan = plan
        self._epoch = 0
        self._records: list[MemberRecord | None] = [None] * size
        self._heard = [0.0] * size
        self._local_ray = local_ray

    def begin(self, index: int, node: str, epoch: int = 0, size: int = 0) -> MemberRecord:
        """Notes that a server is about to start, and returns its record, with the address that it had before.

        A server that the cluster does not have, or not yet, gets a record that nobody sees.

        Args:
            index: The number of the server.
            node: The IP address of its node.
            epoch: The number of size changes that the server's actor knows of.
            size: The number of servers after the last of them.
        """
        self.resize(size, epoch)
        before = self._records[index] if index < self.size() else None
        if before is None:
            record = MemberRecord(index, node=node)
        else:
            record = replace(before, node=node, pid=0, state=MemberState.RESTARTING, restarts=before.restarts + 1)
        record = replace(record, size=self.size(), epoch=self._epoch)
        self.report(record)
        return record

    def report(self, record: MemberRecord) -> None:
        """Notes what the actor of a server says of it."""
        self.resize(record.size, record.epoch)
        if record.epoch < self._epoch and record.state is not MemberState.STOPPED:
            return
        if record.index >= self.size():
            return
        self._records[record.index] = record
        self._heard[record.index] = time.monotonic()

    def epoch(self) -> int:
        """Returns how often the cluster has changed its size."""
        return self._epoch

    def size(self) -> int:
        """Returns the number of servers."""
        return len(self._records)

    def plan(self) -> ClusterPlan | None:
        """Returns what the cluster was to be at its start."""
        return self._plan

    def resize(self, size: int, epoch: int | None = None) -> None:
        """Notes that the cluster has another number of servers.

        Args:
            size: The number of servers.
            epoch: How often the cluster has changed its size by then; None for once more. What belongs to an epoch that
                the directory knows already changes nothing, so this may be said several times.
        """
        epoch = self._epoch + 1 if epoch is None else epoch
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        more = size - self.size()
        self._records = [*self._records[:size], *([None] * more)]
        self._heard = [*self._heard[:size], *([0.0] * more)]

    def addresses(self) -> list[str]:
        """Returns the addresses of the servers in their order; empty for those that have never been up."""
        return [each.address if each else "" for each in self._records]

    def members(self) -> list[Heard]:
        """Returns what is known of the servers, in their order."""
        now = time.monotonic()
        return [
            Heard(record, now - self._heard[index]) if record else Heard(MemberRecord(index), None)
            for index, record in enumerate(self._records)
        ]

    def local_ray(self) -> LocalRay | None:
        """Returns the Ray that ends with its last cluster, None for one that others have started."""
        return self._local_ray


class MemberState(Enum):
    """The state of a server, as last seen by its actor."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True)
class MemberRecord:
    """The directory's record of a server.

    Attributes:
        index: The number of the server.
        address: Where it serves, or last served; empty if it never has.
        node: The IP address of its node.
        pid: The process of the server on the node; 0 before the first.
        state: What it is doing.
        restarts: How often it was started again, by its actor or with it.
        problem: The last words of a server that has ended by itself.
        size: The number of servers of the cluster, as its server knows it; 0 before it was told.
        epoch: How often the cluster had changed its size until then.
    """

    index: int
    address: str = ""
    node: str = ""
    pid: int = 0
    state: MemberState = MemberState.STARTING
    restarts: int = 0
    problem: str = ""
    size: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Heard:
    """The latest record of a server.

    Attributes:
        record: The record.
        age: Seconds since its actor was last heard; None if it never was.
    """

    record: MemberRecord
    age: float | None


@dataclass(frozen=True)
class SeenMember:
    """A server as its cluster sees it.

    Attributes:
        index: Its number.
        address: Where it serves, or last served; empty if it never has.
        node: The IP address of its node.
        pid: The number of its process on the node; 0 if it has none.
        state: "starting", "running", "restarting", "stopped"; "silent" if nothing was heard of its actor for a while.
        restarts: How often it was started again.
        problem: How it ended, and its last words, if it has ended by itself and is not back.
    """

    index: int
    address: str
    node: str
    pid: int
    state: str
    restarts: int
    problem: str


@dataclass(frozen=True)
class LocalRay:
    """The process of `ray start` that `cluster up` has started on this machine.

    Attributes:
        pid: Its number.
        started: The time at which it started, as psutil tells it: numbers are used again.
        port: The port of Ray's head.
    """

    pid: int
    started: float
    port: int
