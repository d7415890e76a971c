"""A plugin for pytest that tells one verdict on all tests that need a GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gpu.check.verdict import Status, Verdict, tell

PART = "tests"
CLAIM = "all tests that need a GPU"


class Counts:
    """Counts what becomes of tests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.first_failure = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: when it is called, or when it fails or is skipped elsewhere."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed and not self.first_failure:
            self.first_failure = f"; {report.nodeid}"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tells the verdict, in the process that has seen all tests."""
        if hasattr(session.config, "workerinput"):
            return
        figure = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        if not self.outcomes["passed"] and not self.outcomes["failed"]:
            tell([Verdict(PART, CLAIM, Status.SKIP, figure or "there are none")])
            return
        status = Status.FAIL if self.outcomes["failed"] or session.exitstatus not in (0, 1) else Status.PASS
        tell([Verdict(PART, CLAIM, status, figure + self.first_failure)])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the counter."""
    config.pluginmanager.register(Counts(), "counts of tests")
