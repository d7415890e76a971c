"""Fleets of worker processes, which a test starts, watches and kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.polling import PATIENCE_SECONDS, eventually


class Fleet:
    """The workers of one run, which can be started, watched and killed by name."""

    def __init__(self, program: "subprocess.Popen[str]", address: str, folder: Path) -> None:
        self._program = program
        self._address = address
        self._folder = folder
        self._ids: dict[str, int] = {}

    def start(self, *names: str) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        for name in names:
            print(self._address, self._folder, name, file=self._program.stdin, flush=True)
            self._ids[name] = int(self._program.stdout.readline())

    def kill(self, name: str) -> None:
        os.kill(self._ids.pop(name), signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        """Waits until a worker is at a step: not a certain one, which may wait for a state of those that are held."""
        self._wait_for("*.step", lambda texts: any(int(each or 0) >= step for each in texts))

    def release(self) -> None:
        """Lets the workers go on from HELD_STEP, at which they wait until then."""
        (self._folder / "go").touch()

    def results(self) -> dict[str, dict[str, Any]]:
        """Waits for all that were not killed, and returns the results by name."""
        for name in self._ids:
            self._wait_for(f"{name}.json", lambda texts: any(each.endswith("}") for each in texts))
        return {name: json.loads((self._folder / f"{name}.json").read_text()) for name in self._ids}

    def _wait_for(self, files: str, accept: Callable[[list[str]], bool]) -> None:
        seen, errors = eventually(
            lambda: (self._texts(files), self._texts("errors")),
            lambda seen: accept(seen[0]) or "Traceback" in "".join(seen[1]),
        )
        assert accept(seen), errors

    def _texts(self, files: str) -> list[str]:
        return [each.read_text() for each in self._folder.glob(files)]


@contextmanager
def running(module: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "GRADSERVE_RESTART_PATIENCE": str(PATIENCE_SECONDS)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
