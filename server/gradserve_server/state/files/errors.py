"""Errors of a state directory."""


class StateError(Exception):
    """A state directory cannot be used. The message names the file, and says what is wrong with it."""


class DamagedError(StateError):
    """A part of a state directory is damaged, which `gradserve state repair` can remove."""
