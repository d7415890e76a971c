"""Measures which lines and branches of the packages the tests run: a plugin of pytest.

PYTEST_PLUGINS=tests.coverage python -m pytest

Every process that runs tests measures itself with SlipCover, from before it imports what it measures. The first process
adds up, prints the figures and fails below the floor. `[tool.slipcover]` of pyproject.toml says what is measured, and
the floor. With the environment variable COVERAGE_JSON, all that was found is written to that file.

Servers in processes of their own are not measured: SlipCover needs seconds to start.
"""

import functools
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import slipcover

_EXCLUDED = [r"^class \w+\(.*Protocol.*\):"]
"""What is declared there does not run."""

_FIRST_PAUSE_SECONDS = 10.0
"""Before probes are taken out for the second time. Later pauses are twice as long as the one before: each time takes a
second, and has less to take out."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begins to measure, before any conftest.py is imported."""
    settings = tomllib.loads((early_config.rootpath / "pyproject.toml").read_text())["tool"]["slipcover"]
    coverage = Coverage(early_config.rootpath, settings)
    early_config.pluginmanager.register(coverage, "branch-coverage")
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(early_config.known_args_namespace, "numprocesses", None):
        coverage.begin()


class Coverage:
    """What is measured, in this process and in all workers of the run that have ended."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Takes the folder of pyproject.toml and its table."""
        self._floor: float = settings["fail-under"]
        self._sources = [str(root / each) for each in settings["source"]]
        self._omitted = [str(root / each) for each in settings["omit"]]
        self._own = _Slipcover(branch=True, exclude_also=_EXCLUDED)
        self._of_workers: list[Mapping[str, Any]] = []

    def begin(self) -> None:
        """Measures from now on what this process imports. One that has workers only waits for them."""
        slipcover.ImportManager(self._own, slipcover.FileMatcher(self._sources, self._omitted)).__enter__()

    def pytest_runtest_logfinish(self) -> None:
        """Takes probes out after a test."""
        self._own.take_out_probes()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes what a worker of pytest-xdist has measured."""
        measured = getattr(node, "workeroutput", {}).get("coverage")
        if measured is not None:
            self._of_workers.append(json.loads(measured))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker hands over what was measured; in the first process fails the run below the floor."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["coverage"] = json.dumps(self._own.get_coverage())
        elif session.exitstatus == pytest.ExitCode.OK and self._total["summary"]["percent_covered"] < self._floor:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the figures."""
        total = self._total
        if "COVERAGE_JSON" in os.environ:
            Path(os.environ["COVERAGE_JSON"]).write_text(json.dumps(total))
        terminalreporter.section("coverage of lines and branches")
        for line in _table(total["files"]):
            terminalreporter.write_line(line)
        percent = total["summary"]["percent_covered"]
        if percent < self._floor:
            terminalreporter.write_line(f"{percent:.2f} % are less than the floor of {self._floor:g} %", red=True)
        else:
            terminalreporter.write_line(f"{percent:.2f} %; the floor is {self._floor:g} %")

    @functools.cached_property
    def _total(self) -> dict[str, Any]:
        total: dict[str, Any] = self._own.get_coverage()
        for measured in self._of_workers:
            slipcover.merge_coverage(total, measured)
        seen = [str(Path(name).absolute()) for name in total["files"]]
        never_imported = slipcover.Slipcover(
            branch=True, source=self._sources, omit=[*self._omitted, *seen], exclude_also=_EXCLUDED
        )
        slipcover.merge_coverage(total, never_imported.get_coverage())
        return total


class _Slipcover(slipcover.Slipcover):  # type: ignore[misc]
    """SlipCover, which before Python 3.12 takes out the probes of what has run often: here between tests only.

    The original does it in the middle of whatever is running. It then reads the locals of all threads, leaves cycles
    that hold them, and fails where another thread changes a dictionary.
    """

    _is_worth_it = False
    _next_time = 0.0
    _pause = _FIRST_PAUSE_SECONDS

    def deinstrument_seen(self) -> None:
        """Called by a probe that has run often, in any thread."""
        self._is_worth_it = True

    def take_out_probes(self) -> None:
        """Takes out probes that have run, unless there is little to gain."""
        if not self._is_worth_it or time.monotonic() < self._next_time:
            return
        self._is_worth_it = False
        with self.lock:
            for file, seen in self._get_newly_seen().items():
                for code in list(self.instrumented[file]):
                    self.deinstrument(code, seen)
                self.all_seen[file].update(seen)
            visited: set[Any] = set()
            for module in list(self.modules):
                for function in self.find_functions(list(vars(module).values()), visited):
                    function.__code__ = self.replace_map.get(function.__code__, function.__code__)
            self.replace_map.clear()
        self._next_time = time.monotonic() + self._pause
        self._pause *= 2


def _table(files: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each package of the packages."""
    sums: dict[str, list[int]] = {}
    for name, file in files.items():
        package = "/".join(Path(name).parent.parts[1:3])
        counts = [len(file[f"{kind}_{what}"]) for what in ("lines", "branches") for kind in ("executed", "missing")]
        sums[package] = [total + count for total, count in zip(sums.get(package, [0] * 4), counts, strict=True)]
    yield f"{'package':40} {'lines':>6} {'missed':>6} {'branches':>8} {'missed':>6} {'%':>6}"
    for package, (lines, missed_lines, branches, missed_branches) in sorted(sums.items()):
        percent = 100 * (lines + branches) / max(1, lines + missed_lines + branches + missed_branches)
        yield (
            f"{package:40} {lines + missed_lines:6} {missed_lines:6} "
            f"{branches + missed_branches:8} {missed_branches:6} {percent:6.1f}"
        )
