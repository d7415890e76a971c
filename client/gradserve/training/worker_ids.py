"""Ids of workers that the user has not named."""

import os
import socket
import uuid


def new_worker_id() -> str:
    """Returns an id that no other worker has, and that says where the worker runs: HOST-PROCESS-RANDOM."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
