"""The identity of a client: its calls count once, and its gradients are one worker's."""

import hashlib
import itertools
import threading
from typing import Any

from gradserve.calls.open_calls import AccumulatorKey, CallId, OpenCalls
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_integer
from gradserve.v1 import accumulator_pb2
from gradserve.worker_ids import new_worker_id

_SEQUENCE_BITS = 64
_ID_BYTES = 16
_REQUEST_IDS = range(1 << (8 * _ID_BYTES + _SEQUENCE_BITS))
_MAX_UNANSWERED = 1024
"""The most numbers that a request may list."""


class RequestIds:
    """Gives ids to the calls of one client. Safe to use from several threads.

    The server knows calls that the client numbers and calls that its user numbers as those of two clients, so neither
    can be mistaken for the other. Users know an id as an integer: a number of their own as that number, which has up to
    64 bits; an id that the client gave as a longer one, which names the same call in every client.

    Attributes:
        client_id: The id of the client, which owns what is private to it.
        open_calls: The calls whose averages have not arrived.
    """

    def __init__(self, client_id: str) -> None:
        """Takes an id that no other client has."""
        self.client_id = client_id
        self.open_calls = OpenCalls()
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        # Names are public in lists, and errors show request ids; the id itself must be known to the server alone.
        self._public_id = _derived(client_id, b"names")
        self._calls_id = _derived(client_id, b"calls")
        self._chosen_id = f"{self._calls_id}-chosen"

    def new_call(self) -> CallId:
        """Returns the id of a new call."""
        with self.open_calls.numbering:
            return CallId(self._calls_id, next(self._numbers))

    def call(self, request_id: Any) -> CallId:
        """Returns the id of the call that a user knows by an integer.

        Raises:
            InvalidArgumentError: It is not an integer that `request_id` returns, or of up to 64 bits.
        """
        number = as_integer(request_id, Argument("request_id"), _REQUEST_IDS)
        prefix, sequence = divmod(number, 1 << _SEQUENCE_BITS)
        return CallId(f"{prefix:0{2 * _ID_BYTES}x}" if prefix else self._chosen_id, sequence)

    def request_id(self, call: CallId) -> int:
        """Returns the integer by which users know a call."""
        if call.client_id == self._chosen_id:
            return call.sequence
        return int(call.client_id, 16) << _SEQUENCE_BITS | call.sequence

    def name(self) -> str:
        """Returns a name that no client has used before."""
        return f"{self.client_id}-{next(self._numbers)}"

    def private_name(self) -> str:
        """Returns a name like `name`, for objects that everybody can list."""
        return f"{self._public_id}-{next(self._numbers)}"

    def worker_id(self) -> str:
        """Returns the default worker id: one for each client and thread, "HOST-PROCESS-RANDOM"."""
        try:
            worker_id: str = self._thread.worker_id
        except AttributeError:
            worker_id = new_worker_id()
            self._thread.worker_id = worker_id
        return worker_id

    def write(self, message: accumulator_pb2.RequestId, call: CallId, accumulator: AccumulatorKey) -> None:
        """Writes the id of a call on an accumulator to its message."""
        message.client_id, message.sequence = call
        if call.client_id in (self._calls_id, self._chosen_id):
            unanswered = self.open_calls.before(accumulator, call)
            if len(unanswered) > _MAX_UNANSWERED:
                message.unanswered_since = unanswered[0]
            elif unanswered:
                message.unanswered.extend(unanswered)
        else:
            # The other client may wait for any of them, or this one may ask for them next.
            message.unanswered.extend(range(max(call.sequence - _MAX_UNANSWERED, 0), call.sequence))


def _derived(client_id: str, purpose: bytes) -> str:
    """Returns an id that does not tell the client's."""
    return hashlib.blake2b(client_id.encode(), digest_size=_ID_BYTES, person=purpose).hexdigest()
