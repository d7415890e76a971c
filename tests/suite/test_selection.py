"""The short suite leaves out what is exhaustive or depends on time; the rest is that; neither has what is long."""

import argparse
from collections.abc import Sequence

import pytest

from tests.suite import parts, selection
from tests.suite.order import LONG, TESTS

pytest_plugins = "pytester"

CONFTEST = """
from tests.suite import selection
pytest_addoption, pytest_ignore_collect = selection.pytest_addoption, selection.pytest_ignore_collect
def pytest_collection_modifyitems(config, items): selection.select(config, items)
"""
MARKED = """
import pytest
def test_plain(): pass
@pytest.mark.exhaustive
def test_exhaustive(): pass
@pytest.mark.timing
def test_timing(): pass
@pytest.mark.long
def test_long(): pass
"""
MARKERS = """
[pytest]
markers =
    exhaustive
    long
    sampled
    timing
"""
FILES = {
    "floods/test_flood": "def test_flood(): pass",
    "some/test_kills": "def test_kill(): pass",
    "some/test_some": MARKED,
}
SHORT, REST = {"test_plain"}, {"test_exhaustive", "test_timing", "test_flood", "test_kill"}


def test_what_is_left_out_exists() -> None:
    assert [path for path in selection.EXHAUSTIVE if not (TESTS / path).exists()] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], SHORT),
        (["--suite", "rest"], REST),
        (["--suite", "all"], SHORT | REST),
        (["--suite", "long"], {"test_long"}),
        (["floods"], {"test_flood"}),
        (["floods/test_flood.py"], {"test_flood"}),
        (["some"], SHORT),
        (["some/test_kills.py"], {"test_kill"}),
        (["some/test_some.py"], {"test_plain", "test_exhaustive", "test_timing"}),
        (["some/test_some.py::test_timing"], {"test_timing"}),
    ],
)
def test_choice(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], expected: set[str]
) -> None:
    monkeypatch.setattr(selection, "TESTS", pytester.path)
    monkeypatch.setattr(selection, "EXHAUSTIVE", {"floods": "", "some/test_kills.py": ""})
    pytester.makeconftest(CONFTEST)
    pytester.makeini(MARKERS)
    for name, source in FILES.items():
        path = pytester.path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    done = pytester.runpytest("-p", "no:asyncio", "-n0", "--collect-only", "-q", *arguments)
    assert {line.partition("::")[2] for line in done.outlines if "::" in line} == expected


SAMPLED = """
import pytest
@pytest.mark.sampled
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_product(a, b): pass
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("number", range(7))
def test_numbers(number): pass
@pytest.mark.parametrize("number", range(2))
def test_all(number): pass
"""
SAMPLE = {"product[1-x]", "product[2-y]", "product[1-z]", "numbers[0]", "numbers[3]", "numbers[6]", "all[0]", "all[1]"}
BESIDE = {f"product[{a}-{b}]" for a in (1, 2, 3) for b in "xyz"} | {f"numbers[{number}]" for number in range(7)}


@pytest.mark.parametrize(
    ("suite", "expected"), [("short", SAMPLE), ("rest", BESIDE - SAMPLE), ("all", BESIDE | SAMPLE)]
)
def test_samples(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, suite: str, expected: set[str]) -> None:
    monkeypatch.setattr(selection, "TESTS", pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makeini(MARKERS)
    pytester.mkdir("some").joinpath("test_sampled.py").write_text(SAMPLED)
    done = pytester.runpytest("-p", "no:asyncio", "-n0", "--collect-only", "-q", "--suite", suite)
    assert {line.partition("::test_")[2] for line in done.outlines if "::" in line} == expected


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_every_file_is_in_one_part(number: int) -> None:
    files = list(TESTS.rglob("test_*.py"))
    found = [[path for path in files if parts.is_in(path, (part, number))] for part in range(1, number + 1)]
    assert sorted(path for part in found for path in part) == sorted(files)
    seconds = [sum(LONG.get(str(path.relative_to(TESTS)), 1) for path in part) for part in found]
    assert max(seconds) - min(seconds) <= max(LONG.values())


def test_folders_and_what_is_beside_the_tests_are_in_every_part() -> None:
    for path in (TESTS, TESTS / "suite", TESTS / "conftest.py"):
        assert parts.is_in(path, (1, 2))
        assert parts.is_in(path, (2, 2))


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b"])
def test_what_is_no_part_says_so(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected K/N .*got {text!r}"):
        parts.part(text)
