"""Shows where the time of a small call goes, on the client and on the server: by room, and as flame graphs.

    python -m benchmarks.stages                       prints the table, and writes it to benchmarks/results/stages
    python -m benchmarks.stages --flames build/flames   also writes a flame graph of each call, way and side there

A sampling profiler (py-spy, installed into an environment of its own) looks at both processes while a client makes one
call after the other. The time of a room is its share of the samples, of the processor time of a call: with what C code
does for it. What no room has called is gRPC's and the event loop's.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import gradserve
from benchmarks.harness import provenance
from benchmarks.harness.environments import ROOT, Environment
from benchmarks.peers.gradserve.kernels import wait_for_kernels
from deploy.costs import WAYS, call_on, connected
from deploy.walks import PACKAGES
from gradserve_testing import ServerProcess

PROFILER = Environment("profiler", ("py-spy==0.4.3",))
CALLS = {"apply_grad": "apply_grad", "take_grad": "apply_grad, take_grad", "push_pull": "push_pull"}
"""The names of the calls that are repeated: a take needs a gradient each time."""
SIDES = ("client", "server")
ELSEWHERE = "gRPC, event loop"
_RATE = 500
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True)
class Stages:
    """The time of a call, and its parts.

    Attributes:
        call: The call.
        way: The way that it goes.
        microseconds: From its begin to its end.
        processor: The processor time of a side, in microseconds.
        rooms: Its parts by room, in microseconds.
    """

    call: str
    way: str
    microseconds: float
    processor: dict[str, float]
    rooms: dict[str, dict[str, float]]


def repeat(call: str, way: str, address: str) -> None:
    """Makes a call again and again; upon SIGTERM, prints how often, and ends."""
    number = 0

    def tell(*_: object) -> None:
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        sys.exit(0)

    signal.signal(signal.SIGTERM, tell)
    with connected(way, address) as client:
        make, prepare = call_on(client, f"stages-{call}-{way}", call)
        while True:
            prepare()
            make()
            number += 1


def measured(seconds: float, flames: Path | None) -> Iterator[Stages]:
    """Yields the stages of each call over each way."""
    profiler = PROFILER.prepare(lambda text: print(text, file=sys.stderr)).with_name("py-spy")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradserve-stages-")))
        server = stack.enter_context(ServerProcess(folder))
        with gradserve.connect(server.address) as client:
            wait_for_kernels(client)
        for call in CALLS:
            for way in WAYS:
                yield _stages(call, way, server, profiler, folder, seconds, flames)


def _stages(
    call: str, way: str, server: ServerProcess, profiler: Path, folder: Path, seconds: float, flames: Path | None
) -> Stages:
    with _running(call, way, server.address) as client:
        time.sleep(_WARM_UP_SECONDS)
        processes = {"client": psutil.Process(client.pid), "server": psutil.Process(server.process.pid)}
        before = {side: _processor_seconds(each) for side, each in processes.items()}
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        used = {side: _processor_seconds(each) - before[side] for side, each in processes.items()}
    # Profiled in a run of its own, as a profiler takes time.
    with _running(call, way, server.address) as profiled:
        time.sleep(_WARM_UP_SECONDS)
        pids = {"client": profiled.pid, "server": server.process.pid}
        samples = {side: _sampled(profiler, pid, folder / side, seconds) for side, pid in pids.items()}
        if flames is not None:
            for side, pid in pids.items():
                flame = flames / f"{call}-{way}-{side}.svg"
                _record(profiler, pid, flame, "flamegraph", seconds)
                flame.write_text(flame.read_text().replace(f"{profiler.parent}/", ""))  # the title is the command
    number = client.number * took / (took + _WARM_UP_SECONDS)
    processor = {side: used[side] / number * 1e6 for side in SIDES}
    rooms = {
        side: {room: processor[side] * count / samples[side].total() for room, count in samples[side].most_common()}
        for side in SIDES
    }
    return Stages(CALLS[call], way, took / number * 1e6, processor, rooms)


@dataclass
class _Client:
    pid: int
    number: int = 0
    """The calls that it has made, once it has ended."""


@contextmanager
def _running(call: str, way: str, address: str) -> Iterator[_Client]:
    command = [sys.executable, "-m", "benchmarks.stages", "--repeat", call, way, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        client = _Client(process.pid)
        try:
            yield client
        finally:
            process.terminate()
            output, _ = process.communicate()
        client.number = int(output)


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _sampled(profiler: Path, pid: int, file: Path, seconds: float) -> Counter[str]:
    """Returns how many samples are of each room."""
    _record(profiler, pid, file, "raw", seconds)
    return rooms_of(file.read_text())


def _record(profiler: Path, pid: int, file: Path, form: str, seconds: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [str(profiler), "record", "--pid", str(pid), "--format", form, "--rate", str(_RATE)]
    command += ["--duration", str(round(seconds)), "--output", str(file)]
    subprocess.run(command, check=True, capture_output=True)


def rooms_of(samples: str) -> Counter[str]:
    """Returns how many samples are of each room, of lines "outermost;...;innermost NUMBER" as py-spy writes them."""
    found: Counter[str] = Counter()
    for line in samples.splitlines():
        frames, _, number = line.rpartition(" ")
        rooms = (_room(frame) for frame in reversed(frames.split(";")))
        found[next((room for room in rooms if room), ELSEWHERE)] += int(number)
    return found


def _room(frame: str) -> str:
    """Returns the room of a frame "FUNCTION (PATH:LINE)", such as "accumulators" or "rpc/listeners"; empty for none."""
    path = Path(frame.rpartition("(")[2].rpartition(":")[0])
    for name in (package.name for package in PACKAGES):
        if name in path.parts:
            inside = path.parts[path.parts.index(name) + 1 : -1]
            if name == "gradserve_protocol":
                return name
            if inside[:1] == ("commands",):  # they run the event loop
                return ELSEWHERE
            return "/".join(inside[:2] if inside[:1] == ("rpc",) else inside[:1]) or "root"
    return ""


def table(found: Stages, most: int = 8) -> list[str]:
    """Returns the lines of the table of one call."""
    lines = [f"{found.call}, {found.way}: {found.microseconds:.0f} us"]
    for side in SIDES:
        parts = [f"{room} {time:.0f}" for room, time in list(found.rooms[side].items())[:most]]
        lines.append(f"  {side} {found.processor[side]:.0f} us: {', '.join(parts)}")
    return lines


def main() -> None:
    """Measures, prints, and writes the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="the time of each measurement (default: 4)")
    parser.add_argument("--flames", type=Path, metavar="FOLDER", help="write flame graphs there")
    parser.add_argument("--json", type=Path, help="the result file (default: a new one in benchmarks/results/stages)")
    parser.add_argument("--repeat", nargs=3, metavar=("CALL", "WAY", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeat:
        return repeat(*arguments.repeat)
    facts = provenance.describe()
    results = []
    for found in measured(arguments.seconds, arguments.flames):
        results.append(found)
        print("\n".join(table(found)), flush=True)
    name = f"{facts['date'].replace(':', '')}.json"
    path = arguments.json or ROOT / "benchmarks" / "results" / "stages" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": facts, "results": [asdict(each) for each in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return None


if __name__ == "__main__":
    main()
