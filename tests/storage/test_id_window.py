"""The latest ids, and what became of them."""

from collections.abc import Sequence

import pytest

from gradserve_server.storage.journal import IdWindow


@pytest.mark.parametrize(
    ("used", "expected", "forgotten"),
    [
        ("", "", ""),
        ("abc", "abc", ""),
        ("abcd", "bcd", "a"),
        ("abcadef", "def", "bca"),
        ("abca", "bca", ""),
        ("aaaa", "a", ""),
    ],
)
def test_the_latest_are_remembered(used: str, expected: Sequence[str], forgotten: str) -> None:
    window: IdWindow[str, int] = IdWindow(3)
    gone = [each for number, letter in enumerate(used) for each in window.remember(letter, number)]
    assert list(window) == list(expected)
    assert gone == list(forgotten)
    assert len(window) == len(expected)
    for letter in "abcdef":
        assert window.get(letter) == (used.rindex(letter) if letter in expected else None)
