"""The exit codes of all commands."""

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """An exit code; `gradserve --help` and docs/command_output.md list them.

    Attributes:
        meaning: What it says.
    """

    meaning: str

    DONE = 0, "done; a server that was asked serves"
    FAILED = 1, "a server cannot be reached, does not serve or has refused a call; or something is damaged, or differs"
    USAGE = 2, "an option, an argument, a setting or a variable is not valid; nothing was done"

    def __new__(cls, number: int, meaning: str) -> Self:
        """Makes a member of a number and its meaning."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code


SIGNALLED = "128 + N", "signal N ended the command at once"
"""The exit codes of commands that a signal has ended, and their meaning."""


def listed() -> list[tuple[str, str]]:
    """Returns all exit codes with their meanings."""
    return [*((str(int(each)), each.meaning) for each in ExitCode), SIGNALLED]
