"""Ids of workers that the user has not named."""

import os
import socket

_RANDOM_BYTES = 6


def new_worker_id() -> str:
    """Returns an id that no other worker has, and that says where the worker runs: HOST-PROCESS-RANDOM.

    Containers may share a host's name, and each has a process 1; a fork has the generators of its parent. So the random
    part comes from the operating system.
    """
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(_RANDOM_BYTES).hex()}"
