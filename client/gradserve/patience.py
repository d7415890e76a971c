"""For how long calls try again while their server may be starting."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_has_all: ContextVar[bool] = ContextVar("has_all_patience", default=False)


@contextmanager
def with_all_patience() -> Iterator[None]:
    """Lets calls in a block try again for as long as their own time limits allow.

    That is for workers of a training run, which can do nothing but wait. A patience that the user has chosen, with
    GRADSERVE_RESTART_PATIENCE, holds all the same.
    """
    token = _has_all.set(True)
    try:
        yield
    finally:
        _has_all.reset(token)


def has_all_patience() -> bool:
    """Returns True in a block of `with_all_patience`."""
    return _has_all.get()
