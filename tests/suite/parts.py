"""Parts of the suites: files of about the same total time, each in one of them."""

import argparse
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from tests.suite.order import LONG, TESTS, dealt

_FORM = re.compile(r"([1-9][0-9]?)/([1-9][0-9]?)")


def part(text: str) -> tuple[int, int]:
    """Reads "K/N", the Kth of N parts.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    found = _FORM.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, such as 2/3, got {text!r}")
    return int(found[1]), int(found[2])


def is_in(path: Path, which: tuple[int, int]) -> bool:
    """Returns True for a file of tests that is in a part, and for all other files and folders."""
    number, of = which
    return path in _files(of)[number - 1] or path not in _all_files()


@cache
def _files(number: int) -> list[Collection[Path]]:
    seconds: Mapping[Path, int] = {path: LONG.get(str(path.relative_to(TESTS)), 1) for path in _all_files()}
    return [frozenset(each) for each in dealt(seconds, number)]


@cache
def _all_files() -> Collection[Path]:
    return frozenset(TESTS.rglob("test_*.py"))
