"""Arguments, as error messages name and describe them."""

import reprlib
from dataclasses import dataclass

from gradserve_protocol.errors import InvalidArgumentError

_LONGEST_TEXT = 200
READING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that Python, NumPy and other libraries raise for a value that cannot be read.

Any other exception, such as a TimeoutError from a signal handler, says nothing about the value and propagates.
"""

_SHOWN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set)


@dataclass(frozen=True)
class Argument:
    """An argument, or a part of one.

    Attributes:
        name: The name that the user knows: "x", "component 'w'".
        field: The `field` of an error; None for the name.
    """

    name: str
    field: str | None = None

    def error(self, expected: str, got: object) -> InvalidArgumentError:
        """Returns the error for an unusable value.

        Args:
            expected: The expectation: "an array".
            got: The value.
        """
        return self.error_saying(expected, described(got))

    def error_saying(self, expected: str, got: str) -> InvalidArgumentError:
        """Returns the error for an unusable value that is described in words."""
        return InvalidArgumentError(
            f"expected {expected} for {self.name}, got {got}", field=self.name if self.field is None else self.field
        )


def described(value: object) -> str:
    """Returns a short description of a value: its literal, or its type."""
    if isinstance(value, type):
        return value.__qualname__
    short = reprlib.Repr()
    short.maxstring = short.maxother = _LONGEST_TEXT
    return short.repr(value) if isinstance(value, _SHOWN) else type(value).__qualname__
