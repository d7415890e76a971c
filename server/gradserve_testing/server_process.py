"""A server in a process of its own, which can be killed, stopped and started again on the same port."""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DYNAMIC = (49_152, 65_535)
_FIRST = 20_000
"""Ray takes ports below for its own processes."""


def free_port() -> int:
    """Returns a port of this machine that nobody listens on; see `free_ports`."""
    (port,) = free_ports(1)
    return port


def free_ports(number: int) -> list[int]:
    """Returns different ports of this machine that nobody listens on.

    They are not among those that the system gives to clients, and to servers that ask for any port: those come and go
    all the time while tests run.
    """
    first, last = map(int, _GIVEN.read_text().split()) if _GIVEN.exists() else _DYNAMIC
    ours = [port for port in range(_FIRST, 1 << 16) if not first <= port <= last]
    candidates = iter(random.SystemRandom().sample(ours, len(ours)))
    with ExitStack() as stack:
        return [_bound(candidates, stack) for _ in range(number)]


def _bound(candidates: Iterator[int], stack: ExitStack) -> int:
    for port in candidates:
        with ExitStack() as trying:
            listening = trying.enter_context(socket.socket())
            with suppress(OSError):  # somebody has it
                listening.bind(("", port))
                stack.push(trying.pop_all())
                return port
    raise OSError(errno.EADDRINUSE, "no port is free")


_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.01


class ServerProcess:
    """Runs `gradserve serve` in a process of its own, until the end of the block.

    with ServerProcess(tmp_path, "--state-dir", "state") as server, gradserve.connect(server.address) as client:
        server.kill()
        server.restart()

    Attributes:
        addresses: Where it listens. It listens there again after a restart.
        process: The process.
    """

    def __init__(self, folder: str | os.PathLike[str], *flags: str, listen: tuple[str, ...] = ("127.0.0.1:0",)) -> None:
        """Makes a server, which starts with the block.

        Args:
            folder: A folder for the address file and the log.
            flags: Further flags of `gradserve serve`, as on the command line. Without --http-listen, there is no HTTP
                port.
            listen: The addresses to listen at; a free port of this machine by default. Port 0 stands for a free one,
                which stays free while the server is down.
        """
        self._address_file = Path(folder) / "addresses"
        self._log = Path(folder) / "log"
        self._flags = ["--http-listen", "off", *flags, "--address-file", str(self._address_file)]
        ports = iter(free_ports(sum(each.endswith(":0") for each in listen)))
        self.addresses = [f"{each[:-1]}{next(ports)}" if each.endswith(":0") else each for each in listen]
        self.process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """The first of its addresses."""
        return self.addresses[0]

    @property
    def log(self) -> str:
        """The text that it has written to its standard output and error."""
        return self._log.read_text()

    @property
    def resident_bytes(self) -> int:
        """The memory that it occupies."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def num_threads(self) -> int:
        """The number of its threads."""
        return int(psutil.Process(self.process.pid).num_threads())

    @property
    def num_descriptors(self) -> int:
        """The number of its open files and sockets."""
        return int(psutil.Process(self.process.pid).num_fds())

    def kill(self) -> None:
        """Kills it with SIGKILL: what is not on its disk is lost. Returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Starts it again at the same addresses, and kills it first if it still runs. Returns when it serves."""
        self.kill()
        self._start()

    def pause(self) -> None:
        """Stops it with SIGSTOP: it keeps its connections, and does nothing until `resume`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = _PATIENCE_SECONDS) -> int:
        """Waits until it has ended; returns the exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.resume()
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def _start(self) -> None:
        self._address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gradserve_server", "serve", *self._flags]
        for address in self.addresses:
            command += ["--listen", address]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.kill()
            raise
        self.addresses = self._address_file.read_text().splitlines()

    def _wait_until_it_serves(self) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self._address_file.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start: {self.log}")
            if time.monotonic() > end:
                raise TimeoutError(f"the server did not start within {_PATIENCE_SECONDS:g} s: {self.log}")
            time.sleep(_LOOK_SECONDS)
