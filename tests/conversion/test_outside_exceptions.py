"""An exception from outside, such as one that a signal handler raises, says nothing about the argument being read."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import gradserve
from gradserve.conversion.arrays import as_array
from gradserve.conversion.plain import as_flag, as_integer, as_list, as_number, as_shape
from gradserve_protocol.argument import Argument

CONVERSIONS: list[Callable[[Any, Argument], object]] = [
    as_array,
    as_flag,
    as_integer,
    lambda value, argument: as_list(value, "a list", argument),
    as_number,
    as_shape,
]


class InterruptedByProgramError(Exception):
    """An exception of a program's own."""


class Raising:
    """A value whose reading takes until a signal handler raises an exception."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise self._error

    __array__ = __float__ = __index__ = __iter__ = _raise


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("error", [TimeoutError("my watchdog"), InterruptedByProgramError("stop"), MemoryError("full")])
def test_exceptions_from_outside_are_passed_on(convert: Callable[[Any, Argument], object], error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        convert(Raising(error), Argument("x"))
    assert raised.value is error


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), RuntimeError("no"), NotImplementedError("no")])
def test_what_a_library_raises_is_a_mistake_in_the_argument(
    convert: Callable[[Any, Argument], object], error: Exception
) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"expected .* for x, got Raising"):
        convert(Raising(error), Argument("x"))


def test_an_unusual_error_of_a_library_is_shown() -> None:
    error = RuntimeError("the tensor has been freed")
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        as_integer(Raising(error), Argument("x"))
    assert raised.value.__cause__ is error
