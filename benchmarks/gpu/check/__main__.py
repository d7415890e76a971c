"""`python -m benchmarks.gpu.check`: one verdict for each line of what only a GPU can settle.

Exit status: 0 if nothing failed, 1 if something failed or was not run, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.machine import Machine, look_around
from benchmarks.gpu.check.part import Part, Ran, run_part
from benchmarks.gpu.check.plan import PARTS
from benchmarks.gpu.check.verdict import Status, Verdict
from benchmarks.harness import provenance
from benchmarks.harness.environments import ROOT

MINUTES = 9.0
_RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check, prints the report, and writes the result file; returns the exit status."""
    given = _parser().parse_args(arguments)
    machine = look_around()
    if isinstance(machine, str):
        print(f"no GPU to check: {machine}", file=sys.stderr)
        return 2
    for name, fact in machine.facts().items():
        print(f"{name.replace('_', ' ')}: {fact}")
    wanted = [part for part in PARTS if not given.only or part.name in given.only]
    ran = run_all(wanted, given.minutes * 60, lambda result: _print(result.verdicts, result.output))
    verdicts = [verdict for each in ran.values() for verdict in each.verdicts]
    path = given.json or _RESULTS / f"gpu-{time.strftime('%Y-%m-%dT%H%M%S+0000', time.gmtime())}.json"
    path.write_text(json.dumps(_content(machine, ran), indent=2) + "\n", encoding="utf-8")
    counts = ", ".join(f"{sum(each.status is status for each in verdicts)} {status}" for status in Status)
    print(f"{counts}; written to {path}")
    return int(any(verdict.status in (Status.FAIL, Status.NOT_RUN) for verdict in verdicts))


def run_all(
    parts: Sequence[Part],
    seconds: float,
    on_part: Callable[[Ran], object],
    clock: Callable[[], float] = time.monotonic,
    run: Callable[[Part, float], Ran] = run_part,
) -> dict[str, Ran]:
    """Runs parts one after the other; the last one has what is left of the time, if that is more than its own."""
    end = clock() + seconds
    ran = {}
    for part in parts:
        left = max(end - clock(), 0.0)
        own = left if part is parts[-1] else min(part.seconds, left)
        ran[part.name] = run(part, own)
        on_part(ran[part.name])
    return ran


def _print(verdicts: Sequence[Verdict], output: Sequence[str]) -> None:
    for verdict in verdicts:
        print(verdict, flush=True)
    for line in output:
        print(f"         | {line}", flush=True)


def _content(machine: Machine, ran: dict[str, Ran]) -> dict[str, Any]:
    return {
        "provenance": {**provenance.describe(), **machine.facts()},
        "seconds": {name: round(each.seconds, 1) for name, each in ran.items()},
        "verdicts": [asdict(verdict) for each in ran.values() for verdict in each.verdicts],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--json", type=Path, help="the result file (default: a new one in benchmarks/results)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"the most it takes (default: {MINUTES:g})")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="a part to run; repeatable (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
