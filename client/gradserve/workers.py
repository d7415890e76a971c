"""The ids of workers that the user has not named, and their patience with a server that may be starting."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gradserve_protocol.errors import DeadlineExceededError

_RANDOM_BYTES = 6
TO_WAIT_ON = "; to wait on, make the same call again"
"""The end of the message of a DeadlineExceededError; a request id may follow."""


def new_worker_id() -> str:
    """Returns an id that no other worker has, and that says where the worker runs: HOST-PROCESS-RANDOM.

    Containers may share a host's name, and each has a process 1; a fork has the generators of its parent. So the random
    part comes from the operating system.
    """
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(_RANDOM_BYTES).hex()}"


_has_all: ContextVar[bool] = ContextVar("has_all_patience", default=False)


@contextmanager
def with_all_patience() -> Iterator[None]:
    """Lets calls in a block try again for as long as their own time limits allow.

    That is for workers of a training run, which can do nothing but wait. A patience that the user has chosen, with
    GRADSERVE_RESTART_PATIENCE, still holds.
    """
    token = _has_all.set(True)
    try:
        yield
    finally:
        _has_all.reset(token)


def has_all_patience() -> bool:
    """Returns True in a block of `with_all_patience`."""
    return _has_all.get()


def without_request_id(error: DeadlineExceededError, way_on: str = TO_WAIT_ON) -> None:
    """Changes what an error says of how to wait on, for calls that have no argument `request_id`.

    Args:
        error: The error.
        way_on: What it says instead; by default, that the same call can be made again.
    """
    error.message = re.sub(rf"{TO_WAIT_ON} with request_id=\d+", way_on, error.message)
