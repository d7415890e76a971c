"""Tables in one test: every case is tried, and those that fail are named."""

import pytest

from tests.together import together


@pytest.fixture
def limit() -> int:
    return 3


@together("number, word", [1, 2, 5], ["one", "two", "five"])
def test_all_cases_get_the_fixtures(limit: int, number: int, word: str) -> None:
    assert len(word) >= limit
    assert number != limit


def test_every_case_that_fails_is_told() -> None:
    @together("number", range(5))
    def is_even(number: int) -> None:
        assert number % 2 == 0, "odd"

    with pytest.raises(ExceptionGroup, match="2 of 5 cases") as raised:
        is_even()
    assert [error.__notes__ for error in raised.value.exceptions] == [["in the case 1"], ["in the case 3"]]


def test_columns_of_different_lengths_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        together("number, word", [1, 2], ["one"])
