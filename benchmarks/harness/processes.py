"""The parent's side of a benchmark process; `benchmarks.peers.driver` is the child's."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.environments import ROOT
from benchmarks.harness.processor_time import processor_seconds

_STOP_SECONDS = 15.0


class ProcessError(Exception):
    """A benchmark process ended, hung, or reported a wrong result."""


class DriverProcess:
    """One process in a peer's environment, speaking the line protocol.

    Args:
        python: The interpreter of the environment.
        module: The module to run, such as `benchmarks.peers.flight.server`.
        setup: The fields of `benchmarks.peers.driver.Setup`.
        variables: Environment variables, in addition to this process's.
        log: The file for the output of the process.
        wrapper: A command that becomes the process, such as `ip netns exec NAME`; empty for none.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        setup: dict[str, Any],
        variables: Mapping[str, str],
        log: Path,
        wrapper: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._log = log
        self._unread = b""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*wrapper, str(python), "-m", module, json.dumps(setup)],
                cwd=ROOT,
                env={**_inherited_variables(), **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
            )

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, command: str) -> None:
        """Sends a command without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def receive(self, timeout: float) -> dict[str, Any]:
        """Waits for the next answer.

        Raises:
            ProcessError: The process ended, gave no answer in time, or answered with an error.
        """
        deadline = time.monotonic() + timeout
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise self._failure(f"gave no answer within {timeout:.0f} s")
            received = os.read(descriptor, 65536)
            if not received:
                raise self._failure("ended")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProcessError(f"{self._module}: {answer['error']}")
        return answer

    def processor_seconds(self) -> float:
        """Returns the processor time that the process and its descendants have used so far."""
        try:
            return processor_seconds(self._process.pid)
        except OSError as error:
            raise self._failure("ended") from error

    def hang_up(self) -> None:
        """Tells the process to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        """Ends the process and waits until it is gone."""
        self.hang_up()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _failure(self, what: str) -> ProcessError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ProcessError(f"{self._module} {what}" + (f": {lines[-1]}" if lines else ""))


def _inherited_variables() -> dict[str, str]:
    """Returns this process's variables, without proxies to loopback, and with less logging."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1"}
