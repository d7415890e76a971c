"""Which docstrings `make lint` refuses."""

import pytest

from deploy.english import problem_of, problems


@pytest.mark.parametrize(
    ("docstring", "is_constructor", "words"),
    [
        ("What a client may hold.", False, "opens with 'What'"),
        ("Whether it is closed.", False, "opens with 'Whether'"),
        ("How long it waits.", False, "opens with 'How'"),
        ("Those who wait.", False, "opens with 'Those'"),
        ("See `Journal`.", False, "refers to another"),
        ("Takes the clock.", True, "repeats the signature"),
        ("Makes the request anew.", False, "has 'anew'"),
        ("Sends the gradient to whoever waits.", False, "has 'whoever'"),
        ("Calls a function that is told the bytes done.", False, "has 'is told'"),
    ],
)
def test_a_docstring_that_is_refused(docstring: str, is_constructor: bool, words: str) -> None:
    assert words in (problem_of(docstring, is_constructor=is_constructor) or "")


@pytest.mark.parametrize(
    "docstring", ["The limits of a client.", "Returns the mean.", "Takes the oldest gradient out of the queue.", ""]
)
def test_a_docstring_that_is_not(docstring: str) -> None:
    assert problem_of(docstring) is None


def test_docstrings_of_attributes_are_read_too() -> None:
    source = '"""A module."""\nLIMIT = 3\n"""How many there may be."""\nx = 1\n\ny = "What is no docstring."\n'
    assert [line for line, _ in problems(source)] == [3]
