"""`python -m benchmarks`: runs the cases, prints their tables, and writes a result file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, Measurement
from benchmarks.harness import provenance
from benchmarks.harness.before import against_before, beside_before, check_out
from benchmarks.harness.comparison import Comparison, ComparisonResult
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import ROOT
from benchmarks.harness.latency import LatencyResult
from benchmarks.harness.memory import MemoryResult
from benchmarks.harness.report import render, render_provenance, render_verdicts

_SECONDS = 20


def main() -> None:
    """Runs what the command line asks for. A missed target is reported, not an error."""
    arguments = _parse()
    start = time.monotonic()
    facts = provenance.describe()
    if arguments.note:
        facts["note"] = arguments.note
    print(render_provenance(facts), flush=True)
    results: list[ComparisonResult | LatencyResult | MemoryResult] = []
    effort = Effort(arguments.repeats, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="gradserve-before-") as folder:
        measurements = [each for name in arguments.only for each in CASES[name]()]
        if commit := arguments.before or arguments.beside:
            facts["before"] = _checked_out(commit, Path(folder))
            both = _against_before if arguments.before else _beside_before
            measurements = both(measurements, Path(folder))
        for measurement in measurements:
            result = measurement.run(effort, _show_progress)
            _show_progress("")
            print(f"\n{render(result)}", flush=True)
            results.append(result)
    facts["load_average_after"] = os.getloadavg()[0]
    facts["minutes"] = round((time.monotonic() - start) / 60, 1)
    verdicts = [verdict for result in results for verdict in result.verdicts()]
    if verdicts:
        print(f"\n{render_verdicts(verdicts)}")
    path = arguments.json or ROOT / "benchmarks" / "results" / f"{facts['date'].replace(':', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "provenance": facts,
        "repeats": arguments.repeats,
        "results": [result.to_json() for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\n{facts['minutes']} minutes; written to {path}")


def _checked_out(commit: str, folder: Path) -> str:
    try:
        check_out(commit, folder)
    except ValueError as error:
        sys.exit(f"commit {commit}: {error}")
    return commit


def _against_before(measurements: Sequence[Measurement], folder: Path) -> list[Measurement]:
    comparisons = [each for each in measurements if isinstance(each, Comparison)]
    return [each for comparison in comparisons for each in against_before(comparison, folder)]


def _beside_before(measurements: Sequence[Measurement], folder: Path) -> list[Measurement]:
    return [beside_before(each, folder) if isinstance(each, Comparison) else each for each in measurements]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=_case_names,
        default=list(CASES),
        metavar="CASE,...",
        help=f"the cases to run, of {', '.join(CASES)} (default: all)",
    )
    parser.add_argument("--repeats", type=_positive, default=10, help="repetitions of each contestant (default: 10)")
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=_SECONDS,
        help="the time after which no more than three repetitions are made, for each table; "
        f"starting processes is not part of it (default: {_SECONDS})",
    )
    commits = parser.add_mutually_exclusive_group()
    commits.add_argument(
        "--before",
        metavar="COMMIT",
        help="compare with gradserve of an earlier commit, instead of the peers",
    )
    commits.add_argument(
        "--beside", metavar="COMMIT", help="compare with gradserve of an earlier commit, beside the peers"
    )
    parser.add_argument("--json", type=Path, help="the result file (default: a new one in benchmarks/results)")
    parser.add_argument("--note", help="a remark for the result file, such as what else the machine was doing")
    return parser.parse_args()


def _case_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(CASES):
        raise argparse.ArgumentTypeError(f"unknown case {', '.join(sorted(unknown))}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _show_progress(text: str) -> None:
    """Overwrites one line of the terminal; silent without a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
