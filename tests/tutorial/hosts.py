"""Two hosts: network namespaces that see each other and nothing else."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.processes import end_process

_PATIENCE_SECONDS = 2 * PATIENCE_SECONDS
"""A program of the tutorial does as much as many tests."""


@dataclass
class Program:
    """A program that runs on a host.

    Attributes:
        process: Its shell.
        log: What it has written.
    """

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def output(self) -> str:
        """What it has written."""
        return self.log.read_text()

    def interrupt(self) -> None:
        """Does what Ctrl-C does, and waits for the end."""
        self._signal(signal.SIGINT)
        self.process.wait(_PATIENCE_SECONDS)

    def end(self) -> None:
        """Kills what still runs of it."""
        self._signal(signal.SIGKILL)
        end_process(self.process)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:  # otherwise its group may be another one's
            os.killpg(self.process.pid, number)

    def wait(self) -> None:
        """Waits until it has ended well."""
        status = self.process.wait(_PATIENCE_SECONDS)
        assert status == 0, self.output


@dataclass
class Host:
    """A host, on which commands are typed in a folder of its own.

    Attributes:
        namespace: The name of its network namespace.
        folder: The folder.
        variables: What the shell has exported.
    """

    namespace: str
    folder: Path
    variables: Mapping[str, str]
    programs: list[Program] = field(default_factory=list)

    def run(self, commands: str) -> str:
        """Runs lines that have been typed, one shell for all of them, and returns what they print."""
        program = self.begin(commands)
        program.wait()
        return program.output

    def begin(self, commands: str) -> Program:
        """Begins to run such lines."""
        log = self.folder / f"log-{len(self.programs)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "bash", "-e", "-c", commands],
                cwd=self.folder,
                env=dict(self.variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.programs.append(Program(process, log))
        return self.programs[-1]

    def close(self) -> None:
        """Ends whatever still runs."""
        for program in self.programs:
            program.end()


def can_make_hosts() -> bool:
    """Returns whether network namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"gradserve-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return True


@contextmanager
def two_hosts(folder: Path, variables: Mapping[str, str]) -> Iterator[tuple[Host, Host]]:
    """Makes two hosts with the addresses 10.0.0.1 and 10.0.0.2, which end with the block."""
    number = os.getpid()
    names = [f"gradserve-{number}-{each}" for each in "ab"]
    links = [f"gs{number}{each}" for each in "ab"]
    hosts = []
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
        (folder / name).mkdir()
        hosts.append(Host(name, folder / name, variables))
    try:
        subprocess.run(
            ["ip", "link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1]],
            check=True,
        )
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            for arguments in (
                ["address", "add", f"10.0.0.{number}/24", "dev", link],
                ["link", "set", link, "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run(["ip", "-n", name, *arguments], check=True)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.close()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=True)
