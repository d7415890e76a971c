"""Long tables of parametrized cases as one test each.

Pytest and pytest-xdist spend about 4 ms on every test that they schedule, send and report, often more than its body
takes. So the cases of a long table run one after the other as one test. Each keeps its own fixtures, marks and skips;
those that fail are reported together, by name. A case that is selected by itself runs by itself;
`--each-case` makes a test of every one.
"""

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest
from _pytest.runner import runtestprotocol  # public API has no way to run an item without reporting it

LONG = 6
"""Cases from which on a table is one test."""


class Table(pytest.Item):
    """The cases of one parametrized function."""

    def __init__(self, *, cases: Sequence[pytest.Function], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self._cases = cases

    @classmethod
    def of(cls, cases: Sequence[pytest.Function]) -> "Table":
        """Makes the table of some cases of one function."""
        first = cases[0]
        assert first.parent is not None
        table: Table = cls.from_parent(first.parent, name=first.originalname, cases=cases)
        table.own_markers = [mark for mark in first.own_markers if mark.name != "parametrize"]
        return table

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the function is, for pytest."""
        path, line, _ = self._cases[0].reportinfo()
        return path, line, self._cases[0].location[2].partition("[")[0]

    def runtest(self) -> None:
        """Not called: `run` has a protocol of its own."""
        raise AssertionError("a table is run by its cases")

    def run(self, nextitem: pytest.Item | None) -> pytest.TestReport:
        """Runs every case and returns one report of all: failed if one failed, skipped if all were."""
        reports: list[tuple[pytest.Function, pytest.TestReport]] = []
        for case, following in itertools.zip_longest(self._cases, self._cases[1:]):
            done = runtestprotocol(case, log=False, nextitem=following or nextitem)
            reports += [(case, report) for report in done]
            if self.session.shouldstop or self.session.shouldfail:
                break
        failed = [(case, report) for case, report in reports if report.failed]
        ran = [report for _, report in reports if report.when == "call" and report.passed]
        skip = next((report.longrepr for _, report in reports if report.skipped), None)
        return pytest.TestReport(
            nodeid=self.nodeid,
            location=self.location,
            keywords=reports[-1][1].keywords,
            outcome="failed" if failed else "passed" if ran else "skipped",
            longrepr="\n".join(_failures(failed, len(self._cases))) if failed else None if ran else skip,
            when="call",
            sections=[section for _, report in failed for section in report.sections],
            duration=sum(report.duration for _, report in reports),
        )


def _failures(failed: Sequence[tuple[pytest.Function, pytest.TestReport]], num_cases: int) -> Iterator[str]:
    yield f"{len({case for case, _ in failed})} of {num_cases} cases failed"
    for case, report in failed:
        yield f"\n{case.nodeid} failed in its {report.when}:"
        yield report.longreprtext


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of runs that look at every case."""
    parser.addoption("--each-case", action="store_true", help="run each case of a long table as a test of its own")


def fold(items: list[pytest.Item]) -> None:
    """Puts tables in the place of their cases."""
    folded: list[pytest.Item] = []
    for _, group in itertools.groupby(items, _function):
        cases = list(group)
        if len(cases) >= LONG and all(isinstance(case, pytest.Function) for case in cases):
            folded.append(Table.of(cases))  # type: ignore[arg-type]
        else:
            folded += cases
    items[:] = folded


def _function(item: pytest.Item) -> tuple[pytest.Item | pytest.Collector | None, str]:
    """The parametrized function that an item is a case of."""
    if isinstance(item, pytest.Function):
        return item.parent, item.originalname
    return item, item.name


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs tables; everything else is left to pytest."""
    if not isinstance(item, Table):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    item.ihook.pytest_runtest_logreport(report=item.run(nextitem))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
