"""Errors of a state directory."""

from gradserve_server.errors import ServiceError

DAMAGES = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RecursionError,
    ServiceError,
)
"""What reading a record raises that is not as it was written."""


class StateError(Exception):
    """A state directory cannot be used. The message names the file, and says what is wrong with it."""


class DamagedError(StateError):
    """A part of a state directory is damaged, which `gradserve state repair` can remove."""


class LostDatabaseError(DamagedError):
    """The metadata of a state directory are gone, and with them all that was in it."""
