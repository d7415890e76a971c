"""The child's side of a benchmark process: commands come in on stdin, answers go out on stdout.

Both directions are lines. The parent writes the name of a command, and the child answers with one JSON object. The
first object, sent without a command, says that the child is ready. End of input ends the process.

    step      do one unit of work     -> {"start": ns, "end": ns}, by the clock that all processes share
    settle    tidy up after it        -> {}
    check     was the result right?   -> {}, or {"error": text}
    report    what else was measured? -> anything

This module runs in the environment of every peer, so it uses the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Setup:
    """The arguments of a process, from its parent."""

    rank: int
    """The number of the worker, from 0; meaningless for a server."""
    num_workers: int
    options: dict[str, Any]
    """The parameters of the case, such as `num_bytes`."""
    server: dict[str, Any]
    """The data that the server process sent when it was ready, such as its address."""
    scratch: Path
    """A folder that the processes of one contestant share."""

    @classmethod
    def from_command_line(cls) -> Setup:
        """Reads the only argument of the process."""
        fields = json.loads(sys.argv[1])
        fields["scratch"] = Path(fields["scratch"])
        return cls(**fields)

    @property
    def num_floats(self) -> int:
        """The length of a float32 array of `num_bytes` bytes."""
        return int(self.options["num_bytes"]) // 4


class Worker(ABC):
    """A process of a contestant that takes part in every step."""

    @abstractmethod
    def step(self) -> None:
        """Does one unit of work; only this is timed."""

    def settle(self) -> None:  # noqa: B027  (most workers have nothing to tidy up)
        """Prepares the next step, after all workers have finished this one."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError unless the last step gave the right result."""

    def report(self) -> dict[str, Any]:
        """Returns what the worker itself measured in the last step; most measure nothing."""
        return {}


def run_worker(make: Callable[[Setup], Worker], packages: Iterable[str]) -> NoReturn:
    """Serves the commands of the parent until it hangs up.

    Args:
        make: Makes the worker; when it returns, the worker is connected and ready for a step.
        packages: The distributions whose versions belong in the results.
    """
    channel = _Channel()
    worker = make(Setup.from_command_line())
    channel.send({"versions": {package: importlib.metadata.version(package) for package in packages}})
    for command in channel.commands():
        channel.send(_obey(worker, command))
    os._exit(0)  # some runtimes would wait for their peers here


def run_server(serve: Callable[[Setup], AbstractContextManager[dict[str, Any]]]) -> NoReturn:
    """Serves until the parent hangs up.

    Args:
        serve: A context manager that runs the server, and returns the data that workers need to reach it.
    """
    channel = _Channel()
    with serve(Setup.from_command_line()) as info:
        channel.send(info)
        for _ in channel.commands():
            pass
    os._exit(0)


def _obey(worker: Worker, command: str) -> dict[str, Any]:
    match command:
        case "step":
            start = time.monotonic_ns()
            worker.step()
            return {"start": start, "end": time.monotonic_ns()}
        case "settle":
            worker.settle()
        case "check":
            try:
                worker.check()
            except AssertionError as error:
                return {"error": str(error) or "wrong result"}
        case "report":
            return worker.report()
        case _:
            raise ValueError(f"unknown command {command!r}")
    return {}


class _Channel:
    """The two pipes to the parent."""

    def __init__(self) -> None:
        # Other output of this process must not end up between the answers.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def send(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def commands(self) -> Iterable[str]:
        return (line.strip() for line in iter(sys.stdin.readline, ""))
