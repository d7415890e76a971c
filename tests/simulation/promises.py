"""The error of a broken promise."""


class BrokenPromiseError(AssertionError):
    """A server did what it must not."""


def check(condition: object, message: str) -> None:
    """Raises an error unless the condition holds."""
    if not condition:
        raise BrokenPromiseError(message)
