"""A server in a process of its own: its own event loop, garbage collector and signals."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from gradserve_server.accumulators.round_hold import HeldRounds

_LAST_LINES = 20
_LOOK_SECONDS = 0.05


class ServerProcess:
    """Runs `gradserve serve` until the end of the block, and ends with the thread that has started it.

    What it writes goes to the standard error of this process, which Ray keeps with the logs of the actor.

    Attributes:
        address: Where it serves; empty before `wait_until_serving`.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        """Takes the flags of `gradserve serve`; starts nothing yet."""
        self.address = ""
        self._flags = flags
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = resources.enter_context(
                tempfile.TemporaryDirectory(prefix="gradserve-", ignore_cleanup_errors=True)
            )
            self._address_file = Path(folder) / "addresses"
            self._rounds_file = Path(folder) / "rounds"
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "gradserve_server.on_ray.bound_process", str(os.getpid())),
                    *self._flags,
                    *("--address-file", str(self._address_file)),
                    *("--rounds-file", str(self._rounds_file)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._reader = threading.Thread(target=self._read, name="gradserve-server-log", daemon=True)
            self._reader.start()
            resources.callback(self._kill)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """How it ended, with the last lines that it has written."""
        self._reader.join(1.0)  # A process of its own, such as a debugger, may still have the pipe.
        lines = "\n".join(self._last)
        return f"exit status {self._process.returncode}" + (f"; its last words:\n{lines}" if lines else "")

    def wait_until_serving(self) -> bool:
        """Waits until it serves; False if it has ended before."""
        while not self.has_ended(within=_LOOK_SECONDS):
            lines = self._address_file.read_text().split("\n") if self._address_file.exists() else []
            if len(lines) > 1:  # The line is complete.
                self.address = lines[0]
                return True
        return False

    def has_ended(self, *, within: float) -> bool:
        """True if it has ended, or ends within a number of seconds."""
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Asks it to end in order."""
        self._process.terminate()

    def hold_rounds(self) -> HeldRounds | None:
        """Asks it to hold rounds, unless it does; returns which are open, None until it says so."""
        found = HeldRounds.read(self._rounds_file)
        if found is None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
        return found

    def release_rounds(self) -> None:
        """Asks it to let rounds begin again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR2)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
