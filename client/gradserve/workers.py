"""The ids of workers that the user has not named, and their patience with a server that may be starting."""

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gradserve_protocol.errors import DeadlineExceededError
from gradserve_protocol.variables import WORKER_ID_VARIABLE

_RANDOM_BYTES = 6
TO_WAIT_ON = "; to wait on, make the same call again"
"""The end of the message of a DeadlineExceededError; a request id may follow."""


def new_worker_id() -> str:
    """Returns the id of a worker that the user has not named: GRADSERVE_WORKER_ID, otherwise HOST-PROCESS-RANDOM.

    The variable names one worker: it holds in the main thread, and not in processes that `multiprocessing` has started.
    No other worker has the second form, and it says where the worker runs.

    Containers may share a host's name, and each has a process 1; a fork has the generators of its parent. So the random
    part comes from the operating system.
    """
    given = os.environ.get(WORKER_ID_VARIABLE)
    if given and threading.current_thread() is threading.main_thread():
        processes = sys.modules.get("multiprocessing.process")
        if processes is None or processes.parent_process() is None:
            return given
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
