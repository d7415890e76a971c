"""Verdicts of a check, one line each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

REPORT_VARIABLE = "CHECK_GPU_REPORT"
"""Names the file to which a part of the check writes its verdicts, each as soon as it is known."""


class Status(StrEnum):
    """The outcome of a claim."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """This machine lacks what it needs; the figure says what."""
    NOT_RUN = "NOT RUN"
    """Its part of the check ended before, by an error or for lack of time."""


@dataclass(frozen=True)
class Verdict:
    """One line of the report.

    Attributes:
        part: The part of the check.
        claim: What should hold.
        status: Whether it does.
        figure: What was measured, or why not.
    """

    part: str
    claim: str
    status: Status
    figure: str = ""

    def __str__(self) -> str:
        figure = f": {self.figure}" if self.figure else ""
        return f"{self.status:<7}  {self.part:<12}  {self.claim}{figure}"


def judged(part: str, claim: str, value: float, least: float, unit: str) -> Verdict:
    """Returns the verdict on a figure that should reach a least value."""
    status = Status.PASS if value >= least else Status.FAIL
    return Verdict(part, claim, status, f"{value:.2f}{unit}, at least {least:.2f}{unit}")


def tell(verdicts: Iterable[Verdict]) -> None:
    """Adds verdicts to the report of this process, or prints them if there is none."""
    path = os.environ.get(REPORT_VARIABLE)
    for verdict in verdicts:
        if path is None:
            print(verdict, flush=True)
            continue
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def read_report(path: Path) -> list[Verdict]:
    """Returns the verdicts in a report; without a last line that its process did not finish."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [Verdict(**{**fields, "status": Status(fields["status"])}) for fields in map(json.loads, lines)]
