"""The identity of a client: what makes its calls count once, and its gradients those of one worker."""

import hashlib
import itertools
import os
import socket
import threading

from gradserve.calls.open_calls import OpenCalls
from gradserve.v1 import accumulator_pb2

_WORKER_NUMBERS = itertools.count()
"""Tells the workers of a process apart, whichever clients they use."""


class RequestIds:
    """Numbers the calls of one client. Safe to use from several threads."""

    def __init__(self, client_id: str) -> None:
        """Takes an id that no other client has."""
        self.client_id = client_id
        self.open_calls = OpenCalls()
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        # Names are listed to everybody; the id is to be known to the server alone.
        self._public_id = hashlib.blake2b(client_id.encode(), digest_size=16).hexdigest()

    def next(self) -> int:
        """Returns a number not used before."""
        return next(self._numbers)

    def name(self) -> str:
        """Returns a name that nobody else uses, and this client did not before."""
        return f"{self.client_id}-{self.next()}"

    def private_name(self) -> str:
        """Returns a name as `name` does, for what everybody can see."""
        return f"{self._public_id}-{self.next()}"

    def worker_id(self) -> str:
        """Returns the worker id of those who give none: one for each client and thread, "HOST-PROCESS-NUMBER"."""
        if not hasattr(self._thread, "worker_id"):
            self._thread.worker_id = f"{socket.gethostname()}-{os.getpid()}-{next(_WORKER_NUMBERS)}"
        worker_id: str = self._thread.worker_id
        return worker_id

    def message(self, number: int, accumulator: accumulator_pb2.AccumulatorRef) -> accumulator_pb2.RequestId:
        """Returns the id of a call on an accumulator as it goes over the wire."""
        return accumulator_pb2.RequestId(
            client_id=self.client_id,
            sequence=number,
            unanswered=self.open_calls.before((accumulator.container, accumulator.name), number),
        )
