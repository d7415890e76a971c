"""What a run prints: one line that moves, failures when they happen, and a summary."""

import time
from collections import Counter
from collections.abc import Sequence

import pytest

_LINES_PER_RUN = 20
"""Where the output is not a terminal, the line is written this often."""


class Progress:
    """Counts the tests of a run, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        """Takes the configuration of the run."""
        self._config = config
        self._collected: dict[object, Sequence[str]] = {}
        self._ended = 0
        self._failed = 0
        self._lines = 0
        self._began = time.monotonic()

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        reporter: pytest.TerminalReporter = self._config.pluginmanager.getplugin("terminalreporter")
        return reporter

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learns how many tests there are."""
        self._collected[None] = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """The same from a worker of pytest-xdist: all of them collect the same tests."""
        self._collected[None] = ids

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
        """Has pytest count tests without a letter for each."""
        if hasattr(report, "wasxfail") or (report.passed and report.when != "call"):
            return None
        return "error" if report.failed and report.when != "call" else report.outcome, "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Names a failure at once."""
        if report.failed:
            self._failed += 1
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)

    def pytest_runtest_logfinish(self) -> None:
        """Moves the line."""
        self._ended += 1
        total = max(self._ended, len(self._collected.get(None, ())))
        line = f"{self._ended:,} of {total:,} tests, {self._failed} failed, {self._time}"
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        elif self._ended * _LINES_PER_RUN >= total * (self._lines + 1):
            self._lines += 1
            self._terminal.ensure_newline()
            self._terminal.write_line(line)

    @property
    def _time(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes}:{seconds:02}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says why tests were skipped: each reason once."""
        terminalreporter.ensure_newline()
        reasons = Counter(
            report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
            for report in terminalreporter.getreports("skipped")
        )
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count} skipped: {reason}")
