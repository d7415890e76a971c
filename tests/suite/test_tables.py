"""Long tables are one test each, and nothing of a case is lost by that."""

import pytest

from tests.suite import tables

pytest_plugins = "pytester"

CONFTEST = """
import pytest
from tests.suite import tables
from tests.suite.tables import pytest_runtest_protocol
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items): tables.fold(items)
"""


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    return pytester.runpytest("-p", "no:asyncio", "-n0", *arguments)


def test_a_long_table_is_one_test_and_a_short_one_is_not(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        f"""
        import pytest
        @pytest.mark.parametrize("n", range({tables.LONG}))
        def test_long(n): pass
        @pytest.mark.parametrize("n", range({tables.LONG - 1}))
        def test_short(n): pass
        """,
    )
    done.assert_outcomes(passed=1 + tables.LONG - 1)


def test_all_cases_run_and_those_that_fail_are_named(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        import pytest
        ran = []
        @pytest.mark.parametrize("n", range(10))
        def test_table(n):
            ran.append(n)
            assert n not in (3, 7), "an unlucky number"
        def test_after():
            assert ran == list(range(10))
        """,
    )
    done.assert_outcomes(failed=1, passed=1)
    done.stdout.fnmatch_lines(
        ["2 of 10 cases failed", "*test_table[[]3] failed in its call:", "*test_table[[]7] failed*"]
    )


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_a_fixture_that_fails_fails_the_table(pytester: pytest.Pytester, phase: str) -> None:
    done = run(
        pytester,
        f"""
        import pytest
        @pytest.fixture
        def fixture(n):
            assert (n, "{phase}") != (4, "setup")
            yield
            assert (n, "{phase}") != (4, "teardown")
        @pytest.mark.parametrize("n", range(10))
        def test_table(n, fixture): pass
        """,
    )
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["1 of 10 cases failed", f"*test_table[[]4] failed in its {phase}:"])


def test_each_case_has_fixtures_of_its_own_and_shares_those_of_its_module(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        import pytest
        made = []
        @pytest.fixture(scope="module")
        def shared():
            made.append("shared")
            yield
            made.append("shared ended")
        @pytest.fixture
        def own():
            made.append("own")
            yield
            made.append("own ended")
        @pytest.mark.parametrize("n", range(6))
        def test_table(n, shared, own): pass
        @pytest.mark.parametrize("n", range(6))
        def test_next_table(n, shared): pass
        def test_after(shared):
            assert made == ["shared", *["own", "own ended"] * 6]
        """,
    )
    done.assert_outcomes(passed=3)


def test_a_table_is_skipped_only_if_all_its_cases_are(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        import pytest
        @pytest.mark.parametrize("n", range(6))
        def test_some(n):
            if n: pytest.skip("some")
        @pytest.mark.skip(reason="all")
        @pytest.mark.parametrize("n", range(6))
        def test_all(n): pass
        """,
        "-rs",
    )
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*: all"])


def test_a_case_that_is_selected_runs_by_itself(pytester: pytest.Pytester) -> None:
    source = """
        import pytest
        @pytest.mark.parametrize("n", range(10))
        def test_table(n): assert n == 3
        """
    run(pytester, source, "-k", "3").assert_outcomes(passed=1)
