"""Ids that nobody can guess, and that tell which run of the server made them."""

import os
from collections.abc import Callable

_BYTES = 16
_AT_ONCE = 256


class RandomIds:
    """Makes ids of 128 random bits, as 32 hexadecimal digits.

    Random bytes are read for many ids at a time. Each read gives other threads the interpreter, and with several of
    them at work it can take milliseconds to get it back.
    """

    def __init__(self) -> None:
        """Makes no id yet."""
        self._ids: list[str] = []

    def __call__(self) -> str:
        """Returns an id that nothing else has."""
        if not self._ids:
            digits = os.urandom(_AT_ONCE * _BYTES).hex()
            self._ids = [digits[start : start + 2 * _BYTES] for start in range(0, len(digits), 2 * _BYTES)]
        return self._ids.pop()


_PREFIX_LENGTH = 8


class ServerRun:
    """Makes ids that tell what another run of the server made.

    Attributes:
        incarnation: The id of the run.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.incarnation = new_id()
        self._prefix = self.incarnation[:_PREFIX_LENGTH]
        self._length = len(self._prefix) + len(self.incarnation)

    def new_id(self) -> str:
        """Returns an id that nothing else has."""
        return self._prefix + self._new_id()

    def is_of_another(self, given: str) -> bool:
        """Returns True if an id has the form of those of a server, and is not of this run."""
        return len(given) == self._length and not given.startswith(self._prefix)
