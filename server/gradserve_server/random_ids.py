"""Ids that nobody can guess."""

import os

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
