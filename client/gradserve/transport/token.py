"""The bearer token of a client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from gradserve.conversion.argument import Argument
from gradserve.variables import TOKEN_VARIABLE

_MAX_CHARACTERS = 1024


@dataclass(frozen=True)
class Token:
    """A bearer token. Its repr does not show it."""

    value: str = field(repr=False)

    @classmethod
    def wanted(cls, token: object, environment: Mapping[str, str]) -> Self | None:
        """Returns the token of an argument, otherwise of GRADSERVE_TOKEN, otherwise None.

        Args:
            token: The argument; None if it was not given.
            environment: The environment variables.

        Raises:
            InvalidArgumentError: It cannot be a token; the message does not show it.
        """
        if token is not None:
            return cls(_checked(token, Argument("token")))
        value = environment.get(TOKEN_VARIABLE)
        return cls(_checked(value, Argument(TOKEN_VARIABLE))) if value else None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls that show it."""
        return (("authorization", f"Bearer {self.value}"),)


def _checked(token: object, argument: Argument) -> str:
    expected = f"1 to {_MAX_CHARACTERS} visible ASCII characters without spaces"
    if not isinstance(token, str):
        raise argument.error_saying(expected, type(token).__qualname__)
    if not 0 < len(token) <= _MAX_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise argument.error_saying(expected, f"other text of {len(token)} characters")
    return token
