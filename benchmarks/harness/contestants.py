"""A contestant: the processes of one implementation, which do a unit of work together."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import Environment, NotAvailableError
from benchmarks.harness.links.hub import Spoke, links_to_hub
from benchmarks.harness.links.network import LinkNotAvailableError
from benchmarks.harness.links.spec import Ends, LinkSpec
from benchmarks.harness.processes import DriverProcess

_READY_SECONDS = 180.0
_STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Contestant:
    """The processes to start for one implementation."""

    label: str
    environment: Environment
    worker: str
    """The module that each worker process runs."""
    server: str | None = None
    """The module that the server processes run, if there are any."""
    num_workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes, in addition to this process's."""
    link: LinkSpec | None = None
    """The link between the workers and each server, which has one of its own; None for loopback."""
    num_servers: int = 1
    """The number of server processes; several are a cluster, and get their number in it as option `cluster_index`."""
    worker_link: LinkSpec | None = None
    """The link of each worker to all others, for workers without a server; its delay is that between two workers. They
    get the name of their network device as option `interface`."""
    num_aggregators: int = 0
    """The number of hosts: each has a server process that passes the gradients of its workers on to the servers."""

    @contextlib.contextmanager
    def running(self, progress: Callable[[str], None]) -> Iterator[RunningContestant]:
        """Starts the processes, and ends them at the end of the block.

        Raises:
            NotAvailableError: The environment or the link cannot be made.
            ProcessError: A process did not get ready.
        """
        python = self.environment.prepare(progress)
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradserve-bench-")))
            info: dict[str, Any] = {}

            def start(
                module: str,
                name: str,
                rank: int,
                options: Mapping[str, Any],
                folder: Path,
                wrapper: Sequence[str] = (),
                server: Mapping[str, Any] | None = None,
            ) -> DriverProcess:
                setup = {
                    "rank": rank,
                    "num_workers": self.num_workers,
                    "options": {**self.options, **options},
                    "server": info if server is None else server,
                    "scratch": str(folder),
                }
                log = scratch / f"{name}.log"
                return stack.enter_context(DriverProcess(python, module, setup, self.variables, log, wrapper))

            servers, addresses, devices = [], list[str](), list[str]()
            for index in range(self.num_servers if self.server is not None else 0):
                assert self.server is not None
                ends = self._link_up(stack)
                options: dict[str, Any] = {}
                if ends is not None:
                    options |= {"listen": ends.listen, "bulk_listen": ends.bulk_listen}
                    devices.append(ends.device)
                if self.num_aggregators:
                    options["transport"] = "bulk"
                if self.num_servers > 1:
                    options |= {"cluster_index": index, "cluster_size": self.num_servers}
                folder = scratch / f"server{index}"
                folder.mkdir()
                server = start(self.server, folder.name, 0, options, folder, ends.enter if ends else ())
                servers.append(server)
                info = server.receive(_READY_SECONDS)
                if ends is not None or "address" in info:
                    addresses.append(info["address"] if ends is None else ends.address)
            if addresses:
                info["address"] = ",".join(addresses)
            listen = {} if self.server is None or self.link is None or self.num_aggregators else options
            hosts = [dict(info)]
            if self.num_aggregators:
                numbers = range(self.num_aggregators)
                hosts = [self._aggregator(start, scratch, info, index, servers) for index in numbers]
            spokes = self._spokes_up(stack)
            workers = [
                start(self.worker, f"worker{rank}", rank, {**listen, "interface": spoke.device}, scratch, spoke.enter)
                for rank, spoke in enumerate(spokes)
            ] or [
                start(
                    self.worker,
                    f"worker{rank}",
                    rank,
                    listen,
                    scratch,
                    server=hosts[rank * len(hosts) // self.num_workers],
                )
                for rank in range(self.num_workers)
            ]
            versions = [worker.receive(_READY_SECONDS)["versions"] for worker in workers]
            try:
                yield RunningContestant(workers, servers, info, versions[0], tuple(devices))
            finally:
                for worker in workers:  # all at once: some runtimes wait for each other
                    worker.hang_up()

    def _aggregator(
        self,
        start: Callable[..., DriverProcess],
        scratch: Path,
        info: Mapping[str, Any],
        index: int,
        servers: list[DriverProcess],
    ) -> dict[str, Any]:
        """Starts the aggregator of a host; returns what its workers need to know of it."""
        assert self.server is not None
        folder = scratch / f"aggregator{index}"
        folder.mkdir()
        options = {"upstream": info["address"], "upstream_workers": self.num_workers // self.num_aggregators}
        process = start(self.server, folder.name, 0, options, folder)
        servers.append(process)
        return process.receive(_READY_SECONDS)

    def _link_up(self, stack: contextlib.ExitStack) -> Ends | None:
        if self.link is None:
            return None
        try:
            return stack.enter_context(self.link.up())
        except LinkNotAvailableError as error:
            raise NotAvailableError(f"no link: {error}") from error

    def _spokes_up(self, stack: contextlib.ExitStack) -> list[Spoke]:
        if self.worker_link is None:
            return []
        link = self.worker_link
        try:
            return stack.enter_context(links_to_hub(self.num_workers, link.megabits, link.round_trip))
        except LinkNotAvailableError as error:
            raise NotAvailableError(f"no link: {error}") from error


@dataclass(frozen=True)
class RunningContestant:
    """Processes that are ready for a step."""

    workers: list[DriverProcess]
    servers: list[DriverProcess]
    """The server processes, if there are any."""
    server_info: dict[str, Any]
    """The data that the server sent when it was ready."""
    versions: dict[str, str]
    devices: tuple[str, ...] = ()
    """The devices that lead to the servers, if there are links."""

    def step(self) -> float:
        """Does one unit of work; returns the seconds from the first worker's start to the last one's end."""
        times = self._all("step")
        first_start = min(int(each["start"]) for each in times)
        last_end = max(int(each["end"]) for each in times)
        return (last_end - first_start) / 1e9

    def processor_seconds(self) -> float:
        """The processor time that all its processes have used so far."""
        return sum(process.processor_seconds() for process in (*self.servers, *self.workers))

    def check(self) -> None:
        """Raises ProcessError unless the last step gave the right result in every worker."""
        self._all("check")

    def settle(self) -> None:
        """Tidies up after a step."""
        self._all("settle")

    def report(self) -> list[dict[str, Any]]:
        """Returns what each worker measured in the last step."""
        return self._all("report")

    def _all(self, command: str) -> list[dict[str, Any]]:
        for worker in self.workers:
            worker.send(command)
        return [worker.receive(_STEP_SECONDS) for worker in self.workers]
