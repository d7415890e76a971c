"""The workers of the examples in each language, as processes."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.processes import end_process, ended

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_OF_AN_OUTER_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
_CPP_TOOLS = ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin")


@dataclass(frozen=True)
class Ended:
    """A worker that has ended well: what it printed, and the bytes of its parameters.

    The digest is None for workers that have parameters of their own.
    """

    begins_at: int
    step: int
    num_counted: int
    digest: str | None
    parameters: bytes


class Worker:
    """A worker that is running."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process = process
        self._output = output

    def result(self) -> Ended:
        """Waits until it has ended, without an error."""
        printed, errors = self._process.communicate(timeout=2 * PATIENCE_SECONDS)
        assert (self._process.returncode, errors) == (0, ""), errors
        begins, ends = printed.splitlines()
        words = ends.split()
        digest = words[7].rstrip(",") if words[6] == "digest" else None
        parameters = self._output.read_bytes()
        return Ended(int(begins.split()[-1]), int(words[2].rstrip(",")), int(words[3]), digest, parameters)

    def kill(self) -> None:
        """Ends it at once."""
        end_process(self._process)

    def failure(self) -> str:
        """Waits until it has ended with an error; returns what it says."""
        _, errors = self._process.communicate(timeout=2 * PATIENCE_SECONDS)
        assert self._process.returncode == 1
        return errors


def command(program: str, language: str) -> list[str | Path]:
    """Returns how a worker in a language is started; skips the test where it cannot be.

    Args:
        program: "words_worker", with parameters of its own, or "parameters_worker", whose parameters the server holds.
        language: Its language.
    """
    match language:
        case "python":
            python = {"words_worker": "words_worker.py", "parameters_worker": "five_workers/numpy_worker.py"}
            return [sys.executable, EXAMPLES / python[program]]
        case "javascript":
            if shutil.which("node") is None:
                pytest.skip("Node.js is not installed")
            return ["node", EXAMPLES / "javascript" / f"{program}.js"]
        case _:
            return [built() / program]


@contextmanager
def running(
    program: str,
    language: str,
    folder: Path,
    address: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Runs a worker, and ends it at the end of the block if it has not ended by itself.

    Args:
        program: The program, as `command` takes it.
        language: Its language.
        folder: Where its parameters go, under its id.
        address: The address of the server.
        arguments: Further arguments, of which the first is its id.
        environment: More variables.
    """
    worker, *options = map(str, arguments)
    output = folder / worker
    process = subprocess.Popen(
        [*command(program, language), address, "--worker", worker, "--output", output, *options],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(process):
        yield Worker(process, output)


def built() -> Path:
    """Returns the folder of the workers in C++, which are built if need be; skips the test where that is impossible."""
    missing = [tool for tool in _CPP_TOOLS if shutil.which(tool) is None]
    if missing or subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False).returncode:
        pytest.skip(f"gRPC for C++ is not installed: {', '.join(missing) or 'pkg-config does not find it'}")
    build = ROOT / "build" / "cpp"
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests may run in several processes
        make = ["make", "-s", "-j2", "-C", str(ROOT), "cpp"]
        environment = {name: value for name, value in os.environ.items() if name not in _OF_AN_OUTER_MAKE}
        done = subprocess.run(make, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\.(cpp|h):\d+:\d+: warning", done.stderr), done.stderr
    return build
