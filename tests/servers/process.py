"""A server in a process of its own: for its memory, its signals and its command line."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil

from tests.servers.polling import PATIENCE_SECONDS, eventually


def run_cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `gradserve` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gradserve_server", *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


class ServerProcess:
    """Runs `gradserve serve` until the end of the block.

    with ServerProcess(tmp_path) as server, gradserve.connect(server.address) as client:
        ...
    """

    def __init__(self, folder: Path, *flags: str, listen: tuple[str, ...] = ("127.0.0.1:0",)) -> None:
        """Takes a folder for the address file and the log, and further flags."""
        self._address_file = folder / "addresses"
        self._log = folder / "log"
        self._flags = [*flags, "--address-file", str(self._address_file)]
        self.addresses = list(listen)
        self.process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def num_threads(self) -> int:
        return int(psutil.Process(self.process.pid).num_threads())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Returns the exit status."""
        return self.process.wait(timeout)

    def replace(self) -> None:
        """Kills the server, and starts another one at the same addresses."""
        self._kill()
        self._start()

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        self._address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gradserve_server", "serve", *self._flags]
        for address in self.addresses:
            command += ["--listen", address]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            eventually(lambda: self._address_file.exists() or self.process.poll() is not None, within=PATIENCE_SECONDS)
            assert self.process.poll() is None, self.log
        except BaseException:
            self._kill()
            raise
        self.addresses = self._address_file.read_text().splitlines()

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self._kill()
                raise

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
