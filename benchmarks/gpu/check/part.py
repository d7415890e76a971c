"""Runs the parts of the check, each in a process of its own: an error of CUDA spoils the process that meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.check.verdict import REPORT_VARIABLE, Status, Verdict, read_report
from benchmarks.harness.environments import ROOT

_LAST_LINES = 15
GO_ON = 75
"""The exit status of a process in which CUDA cannot recover: another one judges the rest (EX_TEMPFAIL)."""


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: Its name in the report.
        command: The command that makes its verdicts, and tells them; see `verdict.tell`.
        seconds: How long it may take.
        claims: What it is to judge at least. What it has not judged when it ends is reported as not run.
    """

    name: str
    command: Sequence[str]
    seconds: float
    claims: Sequence[str] = ()


@dataclass(frozen=True)
class Ran:
    """A part that has been run.

    Attributes:
        verdicts: Its verdicts, and one for each claim that it has not judged.
        seconds: How long it took.
        output: Its last lines, if it has not ended well.
    """

    verdicts: Sequence[Verdict]
    seconds: float
    output: Sequence[str]


def run_part(part: Part, seconds: float) -> Ran:
    """Runs a part; ends it, with all processes that it has started, after `seconds`.

    A part that asks for another process, to go on after an error of CUDA, gets one as long as it tells more each time.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "verdicts.jsonl", Path(folder) / "output.txt"
        num_told = -1
        while True:
            status = _run(part, report, log, seconds - (time.monotonic() - began))
            verdicts = read_report(report)
            if status != GO_ON or len(verdicts) <= num_told:
                break
            num_told = len(verdicts)
        why = _problem(status, seconds)
        with log.open(encoding="utf-8", errors="replace") as lines:
            last = [] if why is None else [line.rstrip("\n") for line in deque(lines, _LAST_LINES)]
    judged = {verdict.claim for verdict in verdicts}
    missing = why or "it ended without a verdict"
    verdicts += [Verdict(part.name, claim, Status.NOT_RUN, missing) for claim in part.claims if claim not in judged]
    if why is not None and not any(verdict.status in (Status.FAIL, Status.NOT_RUN) for verdict in verdicts):
        verdicts.append(Verdict(part.name, "all of it is run", Status.NOT_RUN, why))
    return Ran(verdicts, time.monotonic() - began, last)


def _run(part: Part, report: Path, log: Path, seconds: float) -> int | None:
    """Runs the command of a part; returns its exit status, None if its time was over."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(part.command),
            cwd=ROOT,
            env={**os.environ, REPORT_VARIABLE: str(report)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _problem(status: int | None, seconds: float) -> str | None:
    """Returns why a part has not ended well, None if it has."""
    if status is None:
        return f"its {seconds:.0f} s were over"
    return None if status == 0 else f"it ended with status {status}"
