"""Measures what starts cost: an import, a health check, a server until it serves, and its first minute.

    python -m benchmarks.first_seconds              prints the figures, and writes them to benchmarks/results
    python -m benchmarks.first_seconds --times 20   takes the least of more runs

Processor time, of a process and those that it started: it hardly depends on what else runs on the machine, and the
least of several runs least of all. Each also has the time by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.harness import provenance
from benchmarks.harness.environments import ROOT
from gradserve_server.rpc.health.check import check_health

_MINUTE = 60.0
_HEALTH_SECONDS = 60.0
_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Start:
    """The time and the memory of a start.

    Attributes:
        what: What is started.
        bar: The most processor time that it should take, in seconds; None without one.
        processor: Its processor time, in seconds: the least of all runs.
        clock: Its time by the clock, likewise.
        memory: Its resident memory in MB at the end; None if it ends by itself.
    """

    what: str
    bar: float | None
    processor: float
    clock: float
    memory: float | None = None

    @property
    def line(self) -> str:
        """One line of the table."""
        bar = "" if self.bar is None else f" (at most {self.bar:g} s)"
        memory = "" if self.memory is None else f", {self.memory:.0f} MB"
        return f"{self.what}: {self.processor:.3f} s of processor time{bar}, {self.clock:.2f} s by the clock{memory}"


def least(what: str, bar: float | None, runs: list[Start]) -> Start:
    """Returns the least of several runs of the same start."""
    memory = [each.memory for each in runs if each.memory is not None]
    least_memory = min(memory) if memory else None
    return Start(what, bar, min(each.processor for each in runs), min(each.clock for each in runs), least_memory)


def _ended(*command: str) -> Start:
    """Runs a command to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start("", None, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took)


class _Server:
    """A server from its start on."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *flags: str) -> None:
        self._began = time.perf_counter()
        self.address = f"unix:{folder}/socket"
        command = [sys.executable, "-m", "gradserve_server", "serve", "--listen", self.address, "--http-listen", "off"]
        self._popen = subprocess.Popen([*command, *flags], env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
        self._process = psutil.Process(self._popen.pid)
        while not (folder / "socket").exists():
            time.sleep(_LOOK_SECONDS)
        while check_health(self.address, _HEALTH_SECONDS) != "SERVING":
            time.sleep(_LOOK_SECONDS)
        self.served = self.now()

    def now(self) -> Start:
        """Returns what it has taken so far, with all that it has started."""
        took, own = time.perf_counter() - self._began, self._process.cpu_times()
        total = own.user + own.system + own.children_user + own.children_system
        for child in self._process.children():
            times = child.cpu_times()
            total += times.user + times.system
        return Start("", None, total, took, self._process.memory_info().rss / 1e6)

    def after(self, seconds: float) -> Start:
        """Waits until so long after the start; returns what it has taken by then."""
        time.sleep(max(self._began + seconds - time.perf_counter(), 0))
        return self.now()

    def end(self) -> None:
        """Ends it."""
        self._popen.terminate()
        self._popen.wait()


def measured(times: int, show: Callable[[str], object]) -> list[Start]:
    """Returns all figures.

    Args:
        times: The number of runs of which the least counts; a minute is measured once.
        show: Called with each figure's line as soon as there is one.
    """
    found: list[Start] = []

    def note(start: Start) -> None:
        found.append(start)
        show(start.line)

    with tempfile.TemporaryDirectory(prefix="gradserve-first-") as name:
        folder = Path(name)
        note(least("python -c pass", None, [_ended("-c", "pass") for _ in range(times)]))
        note(least("import gradserve", 0.15, [_ended("-c", "import gradserve") for _ in range(times)]))
        with_client = [_ended("-c", "import gradserve; gradserve.connect") for _ in range(times)]
        note(least("the first name of gradserve, with NumPy and gRPC", None, with_client))
        for cache, bar in (("a filled cache", 1.0), ("an empty cache", 1.0)):
            served = []
            for run in range(times):
                environment = {"NUMBA_CACHE_DIR": str(folder / f"empty-{run}")} if cache == "an empty cache" else {}
                server = _Server(_new(folder), environment)
                served.append(server.served)
                server.end()
            note(least(f"gradserve serve until it serves, with {cache}", bar, served))
        server = _Server(_new(folder), {}, "--warm-up", "false")
        health = [_ended("-m", "gradserve_server", "health", server.address) for _ in range(times)]
        note(least("gradserve health", 0.1, health))
        server.end()
        for cache in ("a filled cache", "an empty cache"):
            environment = {"NUMBA_CACHE_DIR": str(folder / "empty")} if cache == "an empty cache" else {}
            server = _Server(_new(folder), environment)
            note(least(f"the first minute of a server that nobody calls, with {cache}", None, [server.after(_MINUTE)]))
            server.end()
    return found


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def main() -> None:
    """Prints the figures, and writes the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_seconds", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="runs, of which the least counts (default: 10)")
    arguments = parser.parse_args()
    facts = provenance.describe()
    starts = measured(arguments.times, lambda line: print(line, flush=True))
    folder = ROOT / "benchmarks" / "results" / "first_seconds"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{facts['date'].replace(':', '')}.json"
    command = "python -m benchmarks.first_seconds"
    document = {**facts, "command": command, "times": arguments.times, "starts": [asdict(each) for each in starts]}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
