"""The demo's own gradserve server, in a separate process."""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from gradserve_demo.errors import DemoError

_POLL_SECONDS = 0.05
_LOG_TAIL = 2000


class ServerProcess:
    """Runs a server on a free port of this machine while the context lasts.

    Leaving the context asks the server to shut down, and raises `DemoError` if it does not shut
    down cleanly.

    Attributes:
        address: The address it listens on; set inside the context.
    """

    def __init__(self, timeout: float) -> None:
        """Starts nothing yet.

        Args:
            timeout: Seconds that starting may take, and stopping too.
        """
        self.address = ""
        self._timeout = timeout
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = Path(
                resources.enter_context(
                    tempfile.TemporaryDirectory(prefix="gradserve-demo-", ignore_cleanup_errors=True)
                )
            )
            address_file = folder / "address"
            self._log = folder / "server.log"
            # A file, not a pipe: nobody reads it while the server runs, and a full pipe would block the server.
            log = resources.enter_context(self._log.open("wb"))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "gradserve_server", "serve"),
                    *("--listen", "127.0.0.1:0"),
                    *("--address-file", str(address_file)),
                    # Most runs call no ops, and compiling kernels would take processor time from the workers.
                    *("--warm-up", "false"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C should reach only the demo, which then ends the server.
                process_group=0,
            )
            # Runs first on exit: the files must outlive the process.
            resources.callback(self._kill)
            self.address = self._wait_for_address(address_file)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        with self._resources:
            self._process.terminate()
            try:
                code = self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                problem = f"did not shut down within {self._timeout:g} seconds"
            else:
                if code == 0:
                    return
                problem = f"ended with exit code {code}"
            # An error inside the context is kept as this one's context: it may be a consequence of it.
            if exc_value is None or isinstance(exc_value, Exception):
                raise self._error(problem)

    def _wait_for_address(self, address_file: Path) -> str:
        """Returns the address once the server has written it."""
        deadline = time.monotonic() + self._timeout
        while True:
            lines = address_file.read_text().split("\n") if address_file.exists() else []
            if len(lines) > 1:  # The line is complete.
                return lines[0]
            if time.monotonic() > deadline:
                raise self._error(f"did not start within {self._timeout:g} seconds")
            try:
                code = self._process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise self._error(f"ended with exit code {code} before it served")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _error(self, problem: str) -> DemoError:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        return DemoError(f"the server {problem}" + (f"; its last words:\n{tail}" if tail else ""))
