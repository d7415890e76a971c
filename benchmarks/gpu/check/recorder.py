"""A plugin for pytest that runs the tests of claims, and tells a verdict as soon as a claim's tests are done."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check.claims import CLAIMS, MOST_TESTS, Claim
from benchmarks.gpu.check.part import GO_ON
from benchmarks.gpu.check.verdict import REPORT_VARIABLE, Status, Verdict, read_report, tell

PART = "numerics"


class Recorder:
    """Judges the claims from what becomes of their tests."""

    def __init__(self) -> None:
        self._waiting: dict[Claim, list[str]] = {}
        self._ended: dict[str, tuple[Status, str]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keeps the tests of claims, at most `MOST_TESTS` of each, from all over its list."""
        kept: dict[str, pytest.Item] = {}
        path = os.environ.get(REPORT_VARIABLE)
        judged = {verdict.claim for verdict in read_report(Path(path))} if path is not None else set()
        for claim in CLAIMS:
            if claim.text in judged:
                continue  # by a process before this one
            of_claim = [item for item in items if claim.has(item.nodeid)]
            step = max(-(-len(of_claim) // MOST_TESTS), 1)
            chosen = of_claim[::step]
            kept |= {item.nodeid: item for item in chosen}
            self._waiting[claim] = [item.nodeid for item in chosen]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = kept.values()
        self._tell()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure, a reason to skip, or a success."""
        if report.failed:
            self._ended[report.nodeid] = (Status.FAIL, f"{report.nodeid}: {_last_line(report.longreprtext)}")
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._ended[report.nodeid] = (Status.SKIP, why.removeprefix("Skipped: "))
        elif report.when == "teardown":
            self._ended.setdefault(report.nodeid, (Status.PASS, ""))
        if report.when == "teardown":
            self._tell()
            if self._ended[report.nodeid][0] is Status.FAIL and (lost := why_lost()) is not None:
                self._fail_claims_of(report.nodeid)
                pytest.exit(f"this process cannot use the GPU any more: {lost}", GO_ON)

    def _fail_claims_of(self, test: str) -> None:
        """Ends the claims of a test that has failed, though others of their tests have not run."""
        for claim in [claim for claim, tests in self._waiting.items() if test in tests]:
            del self._waiting[claim]
            tell([_verdict(claim, [self._ended[test]])])

    def _tell(self) -> None:
        for claim, names in list(self._waiting.items()):
            ends = [self._ended[name] for name in names if name in self._ended]
            if len(ends) == len(names):
                del self._waiting[claim]
                tell([_verdict(claim, ends)])


def why_lost() -> str | None:
    """Returns the error that everything on the GPU ends with in this process, None if there is none."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None


def _verdict(claim: Claim, ends: list[tuple[Status, str]]) -> Verdict:
    by_status = {status: [why for each, why in ends if each is status] for status in Status}
    if not ends:
        return Verdict(PART, claim.text, Status.NOT_RUN, "it has no tests")
    if failures := by_status[Status.FAIL]:
        return Verdict(PART, claim.text, Status.FAIL, f"{len(failures)} of {len(ends)} tests failed; {failures[0]}")
    if passed := by_status[Status.PASS]:
        return Verdict(PART, claim.text, Status.PASS, f"{len(passed)} tests")
    return Verdict(PART, claim.text, Status.SKIP, by_status[Status.SKIP][0])


def _last_line(text: str) -> str:
    told = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return told[0] if told else text.strip().splitlines()[-1] if text.strip() else "no message"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder."""
    config.pluginmanager.register(Recorder(), "recorder of claims")
