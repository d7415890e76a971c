"""Counts what a small call costs, without a clock: calls of Python functions, system calls, and memory at the peak.

    python -m deploy.costs            prints the costs; fails if a call costs more than deploy/costs.json allows
    python -m deploy.costs --write    writes the present costs there: the diff says what has become dearer

The calls are those of the product's functions, by room. System calls are counted with strace, where that can be used.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
from benchmarks.peers.gradserve.kernels import wait_for_kernels
from deploy.walks import Tracer
from gradserve.transport.settings import TransportName
from gradserve_testing import LocalServer, ServerProcess

BUDGET = Path(__file__).with_name("costs.json")
WAYS: tuple[TransportName, ...] = ("grpc", "bulk", "shared_memory")
CALLS = ("apply_grad", "take_grad", "push_pull")
STRACE = shutil.which("strace")

_NUM_FLOATS = 1024
_NEVER_STALE = 1 << 40
_FREE_CALLS = 20
"""Calls of functions that there may be in addition: on a busy machine, more background work falls into a call."""
_PEAK_TOLERANCE = 1.25
_SYSTEM_TOLERANCE, _SYSTEM_FREE = 1.5, 5.0
"""The factor and the number by which there may be more: threads do not wake each other up equally often each time."""
_MOST_COUNTS = 4
"""The most counts of system calls while there are too many: on a busy machine threads wait in the kernel, where else
they find each other at work. The least count is what the call itself takes."""
_FEW, _MANY = 50, 350
"""The numbers of calls in two runs, of which the second has the system calls of the difference in addition."""
_SUMMARY_SECONDS = 30.0
_TOTAL = re.compile(r"^\s*(\d+)\s+total$", re.MULTILINE)


@dataclass(frozen=True)
class Costs:
    """The costs of one call.

    Attributes:
        calls: The calls of Python functions, by "side/room", such as "server/accumulators".
        peak_bytes: Python's memory at the peak of the call, above that before it, of client and server.
        system_calls: Those of a client's process and of a server's, by side; empty if they could not be counted.
    """

    calls: Mapping[str, int]
    peak_bytes: int
    system_calls: Mapping[str, float] = field(default_factory=dict)

    def of(self, side: str) -> int:
        """Returns the number of calls on a side."""
        return sum(number for room, number in self.calls.items() if room.startswith(f"{side}/"))


def call_on(client: gradserve.Client, name: str, call: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a call with 4 KB on an accumulator of its own, and what has to come before each."""
    gradient = np.ones(_NUM_FLOATS, np.float32)
    if call == "push_pull":
        model = client.gradient_accumulator({"w": gradient}, name)
        return lambda: model.push_pull({"w": gradient}, 1, local_step=_NEVER_STALE), lambda: None
    accumulator = client.conditional_accumulator("float32", gradient.shape, shared_name=name)

    def apply() -> object:
        return accumulator.apply_grad(gradient, local_step=_NEVER_STALE)

    return (apply, lambda: None) if call == "apply_grad" else (lambda: accumulator.take_grad(1), apply)


def measured(budget: Mapping[str, Costs]) -> dict[str, Costs]:
    """Returns the costs of each call over each way; system calls of which a budget has fewer are counted again."""
    found = {}
    with ExitStack() as stack:
        tracer = stack.enter_context(Tracer())
        server = stack.enter_context(LocalServer())
        server.wait_until_prepared()
        clients = {way: stack.enter_context(gradserve.connect(server.address, transport=way)) for way in WAYS}
        for call in CALLS:
            for way in WAYS:
                make, prepare = call_on(clients[way], f"{call}-{way}", call)
                walk = tracer.of(make, prepare)
                calls = {f"{side}/{room}": number for (side, room), number in sorted(walk.by_room.items())}
                found[f"{call}, {way}"] = Costs(calls, _peak(make, prepare))
    if STRACE is not None:
        for title, counts in _system_calls(budget):
            found[title] = Costs(found[title].calls, found[title].peak_bytes, counts)
    return found


def _peak(make: Callable[[], object], prepare: Callable[[], object]) -> int:
    peaks = []
    for _ in range(5):
        prepare()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            make()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
    return min(peaks)


def _system_calls(budget: Mapping[str, Costs]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yields the system calls of each call that can be repeated: a take needs a gradient each time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradserve-costs-")))
        server = stack.enter_context(ServerProcess(folder))
        with gradserve.connect(server.address) as client:
            wait_for_kernels(client)  # whose threads make system calls of their own
        for call in ("apply_grad", "push_pull"):
            for way in WAYS:
                title = f"{call}, {way}"
                allowed = budget[title].system_calls if title in budget else {}
                counts = least_count(partial(_per_call, server, folder, call, way), allowed)
                if not counts:
                    return
                yield title, counts


def least_count(count: Callable[[], Mapping[str, float]], allowed: Mapping[str, float]) -> Mapping[str, float]:
    """Counts system calls, again while there are more than are allowed; returns the least of each side."""
    least = count()
    for _ in range(_MOST_COUNTS - 1):
        if not any(_is_too_many(number, allowed.get(side, 0.0)) for side, number in least.items()):
            break
        again = count()
        least = {side: min(number, again[side]) for side, number in least.items()}
    return least


def _is_too_many(system_calls: float, allowed: float) -> bool:
    return system_calls > allowed * _SYSTEM_TOLERANCE + _SYSTEM_FREE


def _per_call(server: ServerProcess, folder: Path, call: str, way: str) -> dict[str, float]:
    """Returns the system calls of one call, by side; empty without strace."""
    few, many = (_counted(server, folder, call, way, number) for number in (_FEW, _MANY))
    if not few or not many:
        return {}
    return {side: round((many[side] - few[side]) / (_MANY - _FEW), 1) for side in few}


def _counted(server: ServerProcess, folder: Path, call: str, way: str, number: int) -> dict[str, int]:
    """Returns the system calls of a client with so many calls, and of the server meanwhile; empty without strace."""
    of_server, of_client = folder / "server.txt", folder / "client.txt"
    with _attached(server.process.pid, of_server) as is_attached:
        if not is_attached:
            return {}
        program = [sys.executable, "-m", "deploy.costs", "--repeat", call, way, server.address, str(number)]
        subprocess.run([str(STRACE), "-f", "-c", "-U", "calls,name", "-o", of_client, *program], check=True)
    return {"client": _total(of_client), "server": _total(of_server)}


def _total(summary: Path) -> int:
    (found,) = _TOTAL.findall(summary.read_text())
    return int(found)


@contextmanager
def _attached(pid: int, summary: Path) -> Iterator[bool]:
    """Counts the system calls of a process in a block; yields False where it may not be traced."""
    command = [str(STRACE), "-f", "-c", "-U", "calls,name", "-o", str(summary), "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracing:
        assert tracing.stderr is not None
        line = tracing.stderr.readline()
        is_attached = "attached" in line
        yield is_attached
        if is_attached:
            tracing.send_signal(signal.SIGINT)
        tracing.communicate(timeout=_SUMMARY_SECONDS)


def connected(way: str, address: str) -> gradserve.Client:
    """Connects over one of the ways, by its name."""
    return gradserve.connect(address, transport=next(each for each in WAYS if each == way))


def repeat(call: str, way: str, address: str, number: int) -> None:
    """Makes a call so many times."""
    with connected(way, address) as client:
        make, _ = call_on(client, f"{call}-{way}", call)
        for _ in range(number):
            make()


def exceeded(costs: Mapping[str, Costs], budget: Mapping[str, Costs]) -> Iterator[str]:
    """Yields what costs more than it may."""
    for title, found in costs.items():
        allowed = budget.get(title)
        if allowed is None:
            yield f"{title}: it has no budget"
            continue
        for side in ("client", "server"):
            if found.of(side) > allowed.of(side) + _FREE_CALLS:
                more = {
                    room: number - allowed.calls.get(room, 0)
                    for room, number in found.calls.items()
                    if room.startswith(f"{side}/") and number > allowed.calls.get(room, 0)
                }
                where = ", ".join(f"{number:+} in {room}" for room, number in more.items())
                yield f"{title}: {found.of(side)} calls on the {side}, about {allowed.of(side)} are allowed: {where}"
        if found.peak_bytes > allowed.peak_bytes * _PEAK_TOLERANCE:
            yield f"{title}: {found.peak_bytes:,} bytes at the peak, about {allowed.peak_bytes:,} are allowed"
        for side, number in found.system_calls.items():
            allowance = allowed.system_calls.get(side, 0.0)
            if _is_too_many(number, allowance):
                yield f"{title}: {number:g} system calls of the {side}, about {allowance:g} are allowed"


def read_budget(path: Path = BUDGET) -> dict[str, Costs]:
    """Returns the costs that are allowed."""
    return {title: Costs(**costs) for title, costs in json.loads(path.read_text()).items()}


def table(costs: Mapping[str, Costs]) -> list[str]:
    """Returns the lines of a table of the costs."""
    header = f"{'call':28}{'Python calls:':>14}{'':>8}{'KB at':>9}{'system calls:':>15}"
    lines = [header, f"{'':28}{'client':>14}{'server':>8}{'peak':>9}{'client':>15}{'server':>8}"]
    for title, each in costs.items():
        system = [f"{each.system_calls[side]:g}" if each.system_calls else "-" for side in ("client", "server")]
        lines.append(
            f"{title:28}{each.of('client'):14}{each.of('server'):8}{each.peak_bytes / 1000:9.1f}"
            f"{system[0]:>15}{system[1]:>8}"
        )
    return lines


def main() -> None:
    """Prints the costs, and writes or checks the budget."""
    parser = argparse.ArgumentParser(description="Counts what a small call costs, and compares it with its budget.")
    parser.add_argument("--write", action="store_true", help=f"write the costs to {BUDGET.name}")
    parser.add_argument("--repeat", nargs=4, metavar=("CALL", "WAY", "ADDRESS", "NUMBER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeat:
        call, way, address, number = arguments.repeat
        return repeat(call, way, address, int(number))
    budget = {} if arguments.write else read_budget()
    costs = measured(budget)
    sys.stdout.writelines(f"{line}\n" for line in table(costs))
    if not any(each.system_calls for each in costs.values()):
        sys.stdout.write("system calls: not counted, as strace is not installed or may not trace\n")
    if arguments.write:
        written: dict[str, Any] = {title: asdict(each) for title, each in costs.items()}
        BUDGET.write_text(json.dumps(written, indent=2) + "\n")
        return None
    if problems := list(exceeded(costs, budget)):
        sys.exit("\n".join([*problems, "make it cheaper, or allow it: python -m deploy.costs --write"]))
    return None


if __name__ == "__main__":
    main()
