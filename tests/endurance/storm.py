"""Four DiLoCo workers, of which a round needs three, and a kill every 30 seconds. `make storm MINUTES=10`.

A quiet run comes first. Then workers are killed and started again, one after the other, and the server is killed three
times and started again on its directory. Judged, by the records of the rounds and what the workers wrote down: tokens
that counted, beside the quiet run; how many of the workers were in a round; the next round after a kill; that nothing
that was accepted is lost; and that every version has the same bits on all workers.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gradserve
from gradserve.parameter_records import RoundRecord, WeightLedger
from gradserve.testing import ServerProcess
from tests.endurance.chaos import RESULTS, WARM_UP_SECONDS, Entry
from tests.endurance.diloco_worker import GRACE_SECONDS, NAME, NUM_WORKERS
from tests.servers.polling import eventually
from tests.servers.processes import end_process

SERVER_KILLS = 3


@dataclass(frozen=True)
class Mark:
    """A fault.

    Attributes:
        time: When.
        kind: "worker" or "server".
    """

    time: float
    kind: str


@dataclass(frozen=True)
class Observed:
    """The course of a run.

    Attributes:
        records: The records of its rounds.
        weights: The account of all weights in the end.
        entries: The versions that workers had.
        marks: The faults.
        quiet: The time at which it began, without faults.
        begin: The time of the first fault, about.
        end: The time of its end.
    """

    records: list[RoundRecord]
    weights: WeightLedger
    entries: list[Entry]
    marks: list[Mark]
    quiet: float
    begin: float
    end: float


def run(minutes: float, every: float) -> Observed:
    """Runs workers and faults."""
    seconds = minutes * 60
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(ServerProcess(folder, "--state-dir", str(folder / "state"), "--warm-up", "false"))
        workers: list[subprocess.Popen[bytes]] = []

        def end() -> None:
            for each in workers:
                end_process(each)

        stack.callback(end)

        def start(rank: int) -> subprocess.Popen[bytes]:
            log = str(folder / f"worker-{rank}")
            command = [sys.executable, "-m", "tests.endurance.diloco_worker", server.address, str(rank), log]
            return subprocess.Popen(command, env={**os.environ, "GRADSERVE_RESTART_PATIENCE": "100"})

        def entries() -> list[Entry]:
            lines = [line for file in folder.glob("worker-*") for line in file.read_text().splitlines()]
            parts = [line.split() for line in lines]
            return [Entry(float(each[0]), int(each[1]), each[2]) for each in parts if len(each) == 3]

        workers += [start(rank) for rank in range(NUM_WORKERS)]
        eventually(lambda: any(each.step > 2 for each in entries()))
        time.sleep(WARM_UP_SECONDS)
        quiet = time.time()
        time.sleep(max(seconds / 4, every))
        begin = time.time()
        kills = [Mark(begin + every * (number + 0.5), "worker") for number in range(int(seconds / every))]
        kills += [Mark(begin + seconds * (number + 1) / (SERVER_KILLS + 1), "server") for number in range(SERVER_KILLS)]
        marks = []
        ranks = itertools.cycle(range(NUM_WORKERS))
        for due in sorted(kills, key=lambda each: each.time):
            time.sleep(max(due.time - time.time(), 0))
            marks.append(Mark(time.time(), due.kind))
            if due.kind == "server":
                server.kill()
                server.restart()
            else:
                rank = next(ranks)
                end_process(workers[rank])
                workers[rank] = start(rank)
        time.sleep(max(begin + seconds - time.time(), 0))
        ended = time.time()
        with gradserve.connect(server.address, timeout=60) as client:
            parameters = client.parameters(shared_name=NAME)
            return Observed(parameters.rounds(), parameters.info().weights, entries(), marks, quiet, begin, ended)


def judged(observed: Observed) -> dict[str, object]:
    """Returns the figures, and what they come to."""

    def tokens(begin: float, end: float) -> float:
        weights = [
            each.weight_asked
            for record in observed.records
            if begin <= record.end_time < end
            for each in record.updates
        ]
        return sum(weights) / (end - begin)

    def wait_after(kind: str) -> float:
        ends = [record.end_time for record in observed.records]
        waits = [
            min((end for end in ends if end > mark.time), default=float("inf")) - mark.time
            for mark in observed.marks
            if mark.kind == kind
        ]
        return max(waits, default=0.0)

    stormy = [len(each.updates) for each in observed.records if observed.begin <= each.end_time < observed.end]
    digests: dict[int, set[str]] = defaultdict(set)
    for entry in observed.entries:
        digests[entry.step].add(entry.digest)
    for record in observed.records:
        digests[record.step].add(record.digest_after)
    account = observed.weights
    missing = account.accepted - account.applied - account.pending - account.refused.get("loaded", 0.0)
    quiet, storm = tokens(observed.quiet, observed.begin), tokens(observed.begin, observed.end)
    figures = {
        "kills_of_workers": sum(each.kind == "worker" for each in observed.marks),
        "kills_of_the_server": sum(each.kind == "server" for each in observed.marks),
        "rounds": len(stormy),
        "quiet_tokens_per_second": quiet,
        "tokens_per_second": storm,
        "share_of_quiet": storm / quiet if quiet else 0.0,
        "participation": sum(stormy) / max(NUM_WORKERS * len(stormy), 1),
        "longest_wait_after_a_kill_of_a_worker": wait_after("worker"),
        "longest_wait_after_a_kill_of_the_server": wait_after("server"),
        "versions_that_differ": sum(len(each) > 1 for each in digests.values()),
        "accepted_weight_that_is_missing": missing,
    }
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "seconds": observed.end - observed.begin,
        "figures": figures,
        "reached": {
            "at least 95 % of the tokens of a quiet run": figures["share_of_quiet"] >= 0.95,
            "at least 90 % of the workers in a round": figures["participation"] >= 0.9,
            "the next round within a second and the grace of the kill of a worker": (
                wait_after("worker") <= GRACE_SECONDS + 1.0
            ),
            "the next round within 5 s of the kill of the server": wait_after("server") <= 5.0,
            "nothing that was accepted is lost": abs(missing) < 1e-6 * max(account.accepted, 1.0),
            "equal versions on all workers": not figures["versions_that_differ"],
        },
    }


def main() -> int:
    """Returns 0 if all was reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills of workers")
    parser.add_argument("--output", type=Path, default=RESULTS / "storm.json")
    arguments = parser.parse_args()
    result = judged(run(arguments.minutes, arguments.every))
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    reached: dict[str, bool] = result["reached"]  # type: ignore[assignment]
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
