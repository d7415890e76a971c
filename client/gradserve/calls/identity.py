"""The identity of a client: its calls count once, and its gradients are one worker's."""

import hashlib
import itertools
import os
import socket
import threading

from gradserve.calls.open_calls import AccumulatorKey, OpenCalls
from gradserve.v1 import accumulator_pb2

_WORKER_NUMBERS = itertools.count()
"""Numbers the workers of a process, across all clients."""


class RequestIds:
    """Numbers the calls of one client. Safe to use from several threads."""

    def __init__(self, client_id: str) -> None:
        """Takes an id that no other client has."""
        self.client_id = client_id
        self.open_calls = OpenCalls()
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        # Names are public in lists; the id must be known to the server alone.
        self._public_id = hashlib.blake2b(client_id.encode(), digest_size=16).hexdigest()

    def next(self) -> int:
        """Returns a number not used before."""
        return next(self._numbers)

    def name(self) -> str:
        """Returns a name that no client has used before."""
        return f"{self.client_id}-{self.next()}"

    def private_name(self) -> str:
        """Returns a name like `name`, for objects that everybody can list."""
        return f"{self._public_id}-{self.next()}"

    def worker_id(self) -> str:
        """Returns the default worker id: one for each client and thread, "HOST-PROCESS-NUMBER"."""
        try:
            worker_id: str = self._thread.worker_id
        except AttributeError:
            worker_id = f"{socket.gethostname()}-{os.getpid()}-{next(_WORKER_NUMBERS)}"
            self._thread.worker_id = worker_id
        return worker_id

    def write(self, message: accumulator_pb2.RequestId, number: int, accumulator: AccumulatorKey) -> None:
        """Writes the id of a call on an accumulator to its message."""
        message.client_id = self.client_id
        message.sequence = number
        if unanswered := self.open_calls.before(accumulator, number):
            message.unanswered.extend(unanswered)
