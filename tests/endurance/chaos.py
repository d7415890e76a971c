"""Four workers on a durable server, and a fault every 20 seconds. `make chaos MINUTES=10`.

A quiet run comes first. Then, in turn: a worker is killed and replaced, a worker is stopped for five seconds, the
server is killed and started again on its directory, the network is cut for half a second. Judged: the next round ends
within a second of the kill of a worker; at least 95 % of the steps of the quiet run; every average has the same bits on
all workers that got it.
"""

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gradserve.testing import FaultyProxy, ServerProcess
from tests.endurance.picture import Series, draw, rates
from tests.endurance.worker import NUM_WORKERS
from tests.servers.polling import eventually
from tests.servers.processes import end_process

RESULTS = Path(__file__).parent / "results"
WARM_UP_SECONDS = 5.0
STOPPED_SECONDS = 5.0
CUT_SECONDS = 0.5


@dataclass(frozen=True)
class Entry:
    """An average that a worker got."""

    time: float
    step: int
    digest: str


@dataclass
class Crew:
    """A server, the network before it, and workers."""

    server: ServerProcess
    network: FaultyProxy
    folder: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_worker(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.endurance.worker", self.network.address, str(rank), str(self.log(rank))]
        # On a machine with other work, a server may take long to start.
        return subprocess.Popen(command, env={**os.environ, "GRADSERVE_RESTART_PATIENCE": "100"})

    def log(self, rank: int) -> Path:
        return self.folder / f"worker-{rank}"

    def entries(self, rank: int) -> list[Entry]:
        """Returns what a worker got, without a line that it was writing when it was killed."""
        found = []
        for line in self.log(rank).read_text().splitlines() if self.log(rank).exists() else ():
            parts = line.split()
            if len(parts) == 3 and len(parts[2]) == 16:
                found.append(Entry(float(parts[0]), int(parts[1]), parts[2]))
        return found

    def kill_worker(self, number: int) -> None:
        rank = number % NUM_WORKERS
        end_process(self.workers[rank])
        self.workers[rank] = self.start_worker(rank)

    def stop_worker(self, number: int) -> None:
        worker = self.workers[number % NUM_WORKERS]
        worker.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        worker.send_signal(signal.SIGCONT)

    def kill_server(self, _number: int) -> None:
        self.server.kill()
        self.server.restart()

    def cut_network(self, _number: int) -> None:
        self.network.cut()
        time.sleep(CUT_SECONDS)
        self.network.heal()


@contextmanager
def running_crew() -> Iterator[Crew]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--state-dir", str(folder / "state"), "--bulk-listen", "off", "--shared-memory-socket", "off")
        server = stack.enter_context(ServerProcess(folder, *flags, "--warm-up", "false"))
        network = stack.enter_context(FaultyProxy(server.address))
        crew = Crew(server, network, folder)
        try:
            crew.workers = [crew.start_worker(rank) for rank in range(NUM_WORKERS)]
            eventually(lambda: all(crew.entries(rank) for rank in range(NUM_WORKERS)))
            time.sleep(WARM_UP_SECONDS)
            yield crew
        finally:
            for worker in crew.workers:
                end_process(worker)


def run(minutes: float, every: float) -> dict[str, object]:
    """Returns what was measured."""
    seconds = minutes * 60
    marks: list[tuple[float, str]] = []
    with running_crew() as crew:
        quiet_begin = time.time()
        time.sleep(max(every, seconds / 4))
        begin = time.time()
        faults: tuple[Callable[[int], None], ...] = (
            crew.kill_worker,
            crew.stop_worker,
            crew.kill_server,
            crew.cut_network,
        )
        for number, fault in zip(itertools.count(), itertools.cycle(faults)):
            due = begin + every * (number + 0.5)
            if due + every / 2 > begin + seconds:
                break
            time.sleep(max(due - time.time(), 0))
            marks.append((time.time(), fault.__name__))
            fault(number // len(faults))
        time.sleep(max(begin + seconds - time.time(), 0))
        end = time.time()
        logs = [crew.entries(rank) for rank in range(NUM_WORKERS)]
    return judged(logs, marks, quiet_begin, begin, end)


def judged(
    logs: list[list[Entry]], marks: list[tuple[float, str]], quiet_begin: float, begin: float, end: float
) -> dict[str, object]:
    """Returns the figures, and what they come to."""
    ends: dict[int, float] = {}
    digests: dict[int, set[str]] = defaultdict(set)
    for entry in itertools.chain(*logs):
        ends[entry.step] = min(ends.get(entry.step, entry.time), entry.time)
        digests[entry.step].add(entry.digest)
    quiet = sum(quiet_begin <= time < begin for time in ends.values()) / (begin - quiet_begin)
    chaotic = sum(begin <= time < end for time in ends.values()) / (end - begin)
    gaps = [
        min((time for time in ends.values() if time > at), default=float("inf")) - at
        for at, fault in marks
        if fault == "kill_worker"
    ]
    figures = {
        "faults": len(marks),
        "steps": len(ends),
        "quiet_steps_per_second": quiet,
        "steps_per_second": chaotic,
        "share_of_quiet": chaotic / quiet,
        "longest_wait_after_a_kill_of_a_worker": max(gaps, default=0.0),
        "averages_that_differ": sum(len(each) > 1 for each in digests.values()),
        "averages_seen_by_several": sum(
            count > 1
            for count in (sum(any(each.step == step for each in log) for log in logs) for step in list(ends)[-1000:])
        ),
    }
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} before",
        "seconds": end - begin,
        "figures": figures,
        "reached": {
            "the next round ends within 1 s of the kill of a worker": max(gaps, default=0.0) <= 1.0,
            "at least 95 % of the steps of a quiet run": chaotic >= 0.95 * quiet,
            "equal averages on all workers": figures["averages_that_differ"] == 0,
        },
        "marks": [(at - quiet_begin, fault) for at, fault in marks],
        "rates": rates([time - quiet_begin for time in sorted(ends.values()) if time >= quiet_begin], 1.0),
    }


def main() -> int:
    """Returns 0 if all was reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos.json")
    arguments = parser.parse_args()
    result = run(arguments.minutes, arguments.every)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    marks = [(float(at), str(fault)) for at, fault in result["marks"]]  # type: ignore[attr-defined]
    points = [(float(at), float(rate)) for at, rate in result["rates"]]  # type: ignore[attr-defined]
    picture = draw(
        f"Four workers on a durable server, {len(marks)} faults: {result['machine']}",
        [Series("steps per second", points)],
        marks,
    )
    arguments.output.with_suffix(".svg").write_text(picture)
    sys.stdout.write(json.dumps({key: result[key] for key in ("figures", "reached")}, indent=1) + "\n")
    reached: dict[str, bool] = result["reached"]  # type: ignore[assignment]
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
