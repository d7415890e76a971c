"""Arguments as error messages name them."""

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
"""What Python, NumPy and the libraries of arrays raise for a value that cannot be read in some way.

Any other exception, such as a TimeoutError that a signal handler raises, says nothing about the value and
is passed on.
"""

_SHOWN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set)


@dataclass(frozen=True)
class Argument:
    """An argument, or a part of one.

    Attributes:
        name: The name its user knows: "x", "component 'w'".
        field: The `field` of an error; None if it is the name.
    """

    name: str
    field: str | None = None

    def error(self, expected: str, got: object) -> InvalidArgumentError:
        """Returns the error for a value that cannot be used.

        Args:
            expected: What was expected: "an array".
            got: The value.
        """
        return self.error_saying(expected, described(got))

    def error_saying(self, expected: str, got: str) -> InvalidArgumentError:
        """Returns the error for a value that cannot be used, with the value described in words."""
        return InvalidArgumentError(
            f"expected {expected} for {self.name}, got {got}", field=self.name if self.field is None else self.field
        )


def described(value: object) -> str:
    """Returns a short description of a value: as it is written, or its type."""
    if isinstance(value, type):
        return value.__qualname__
    short = reprlib.Repr()
    short.maxstring = short.maxother = _LONGEST_TEXT
    return short.repr(value) if isinstance(value, _SHOWN) else type(value).__qualname__
