"""The identity of a client: its request ids, worker ids and private names, and its calls that are under way."""

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradserve.calls.exchange import Operation, Pause
from gradserve.conversion.plain import as_integer
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    CallCancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from gradserve_protocol.v1 import accumulator_pb2

AccumulatorKey = tuple[str, ...]
"""The kind, container and name of an accumulator or of parameters."""
_MOST_TO_COME = 16
MAY_COME_AGAIN = (CallCancelledError, DeadlineExceededError, InternalError, UnavailableError)
"""The errors after which a call may be made again with its request id."""
_SEQUENCE_BITS = 64
_ID_BYTES = 16
_REQUEST_IDS = range(1 << (8 * _ID_BYTES + _SEQUENCE_BITS))
_MAX_UNANSWERED = 1024
"""The most numbers that a request may list."""
MOST_CALLS = 512
"""The most calls sent since the earliest that may still be on its way, and that one itself: half the usual window."""
MOST_ON_ONE_CONNECTION = 200
"""The same for calls that do not wait: over gRPC all of them take one connection, and a server refuses more than 256
there, its max_connection_calls."""
ARRIVED_SECONDS = 3.0
"""The time without any answer after which calls count as arrived: a push_pull waits for gradients of later calls."""
SURELY_ARRIVED_SECONDS = 30.0
"""The time after which a call counts as arrived although others are answered."""
_PAUSE_SECONDS = 0.01
_SHARE_SECONDS = 0.0005
"""The part of a pause for each call that is held back: all together look about 2,000 times a second."""


class CallId(NamedTuple):
    """The id by which the server knows a call.

    Attributes:
        client_id: The client whose calls the number counts.
        sequence: The number.
    """

    client_id: str
    sequence: int


@dataclass
class _Calls:
    """The calls on one accumulator.

    Attributes:
        num_sent: The number of calls sent.
        on_the_way: When each call was sent that may not have arrived, by its number, the earliest first.
        num_held: The number of calls that are held back.
        answered_at: When the latest answer came.
    """

    num_sent: int = 0
    on_the_way: dict[int, float] = field(default_factory=dict)
    num_held: int = 0
    answered_at: float = -math.inf


class Pacing:
    """Holds back calls while many are on their way to one accumulator, so that none is overtaken by too many.

    A server remembers the latest `id_window` calls of each client on an accumulator, 1,024 unless told otherwise, and
    refuses a call that arrives when later ones have filled that memory: it cannot tell whether it was carried out.
    Calls of one client overtake each other, as they take several connections.

    Safe to use from several threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[AccumulatorKey, _Calls] = {}

    def turn(self, accumulator: AccumulatorKey, *, waits: bool) -> Operation[None]:
        """Waits until another call may be sent, which `sent` must follow at once.

        Args:
            accumulator: The accumulator.
            waits: Whether the call waits for others.
        """
        calls = self._calls.get(accumulator)
        most = MOST_CALLS if waits else MOST_ON_ONE_CONNECTION
        if calls is None or self._may_send(calls, most):
            return
        calls.num_held += 1
        try:
            while not self._may_send(calls, most):
                yield Pause(_PAUSE_SECONDS + _SHARE_SECONDS * calls.num_held)
        finally:
            calls.num_held -= 1

    @contextmanager
    def sent(self, accumulator: AccumulatorKey) -> Iterator[None]:
        """Notes a call, which is made in the block."""
        with self._lock:
            calls = self._calls.setdefault(accumulator, _Calls())
            number = calls.num_sent
            calls.num_sent += 1
            calls.on_the_way[number] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                calls.on_the_way.pop(number, None)
                calls.answered_at = self._clock()
                if not calls.on_the_way and not calls.num_held:
                    self._calls.pop(accumulator, None)

    def _may_send(self, calls: _Calls, most: int) -> bool:
        with self._lock:
            now = self._clock()
            are_answered = calls.answered_at > now - ARRIVED_SECONDS  # a slow server may have to come to it yet
            latest = now - (SURELY_ARRIVED_SECONDS if are_answered else ARRIVED_SECONDS)
            while calls.on_the_way:
                number, sent_at = next(iter(calls.on_the_way.items()))
                if sent_at > latest:
                    return calls.num_sent - number < most
                del calls.on_the_way[number]
            return True


class OpenCalls:
    """The takes and push_pulls of one client whose averages have not arrived.

    Each request tells the server the numbers of the open calls, so that the server keeps their averages. A failed call
    stays open because it may be repeated with its request id: the latest 16 of each accumulator do. A call whose id its
    user has asked for counts as open from then on, and may be repeated after an interruption, too.

    Safe to use from several threads.

    Attributes:
        numbering: Held while a call gets its number. A call that waits is listed before the lock is released, so no
            call with a greater number, which may reach the server at any time, can miss it.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end objects here whose calls have numbers, too.
        self.numbering = self._lock = threading.RLock()
        self._open: dict[AccumulatorKey, dict[CallId, None]] = {}
        self._failed: dict[AccumulatorKey, dict[CallId, None]] = {}
        self._reserved: dict[CallId, None] = {}
        self._pushing: set[tuple[AccumulatorKey, str]] = set()

    def reserve(self, call: CallId) -> None:
        """Lists a call as open that will be made, on any accumulator, until its average has arrived.

        The latest 16 are listed: those that are never made, or wait for no average, give way to later ones.
        """
        with self._lock:
            _add(self._reserved, call)

    def before(self, accumulator: AccumulatorKey, call: CallId) -> list[int]:
        """Returns the numbers of the open calls on an accumulator before this one."""
        if not (self._open or self._failed or self._reserved):
            return []
        with self._lock:
            found = {**self._open.get(accumulator, {}), **self._failed.get(accumulator, {}), **self._reserved}
        return sorted([each.sequence for each in found if each.client_id == call.client_id and each < call])

    def opened(
        self, accumulator: AccumulatorKey, new_call: Callable[[], CallId], *, may_come_again: bool = True
    ) -> AbstractContextManager[CallId]:
        """Lists a call as open while the block waits for its average, and after an error that permits a retry.

        Args:
            accumulator: Its accumulator.
            new_call: Returns the id of the call, which the block gets.
            may_come_again: False if nobody will make the call again, whatever its error permits.
        """
        return _Opened(self, accumulator, new_call, may_come_again=may_come_again)

    def begin(self, accumulator: AccumulatorKey, call: CallId) -> None:
        """Lists a call as open; `end` must follow."""
        with self._lock:
            if accumulator in self._failed:
                self._failed[accumulator].pop(call, None)
            self._open.setdefault(accumulator, {})[call] = None

    def end(self, accumulator: AccumulatorKey, call: CallId, error: BaseException | None) -> None:
        """Takes a call off the list, unless its error permits a retry."""
        with self._lock:
            self._close(self._open, accumulator, call)
            if isinstance(error, MAY_COME_AGAIN):
                _add(self._failed.setdefault(accumulator, {}), call)
                return
            if not isinstance(error, GeneratorExit):  # if interrupted, only who has reserved it can make it again
                self._reserved.pop(call, None)
            if accumulator in self._failed:
                self._close(self._failed, accumulator, call)

    @contextmanager
    def alone(self, accumulator: AccumulatorKey, worker_id: str) -> Iterator[None]:
        """Allows one push_pull at a time under the default worker id.

        Raises:
            InvalidArgumentError: Another one is under way: two workers share the id, and only one would count.
        """
        key = (accumulator, worker_id)
        with self._lock:
            if key in self._pushing:
                raise InvalidArgumentError(
                    f"expected a worker_id, got none: another push_pull to {accumulator[0]} {accumulator[-1]!r} is "
                    f"under way with this client's default one, {worker_id!r}, and each worker counts once a round",
                    field="worker_id",
                )
            self._pushing.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._pushing.discard(key)

    @staticmethod
    def _close(calls: dict[AccumulatorKey, dict[CallId, None]], accumulator: AccumulatorKey, call: CallId) -> None:
        numbers = calls[accumulator]
        numbers.pop(call, None)
        if not numbers:
            del calls[accumulator]


def _add(calls: dict[CallId, None], call: CallId) -> None:
    """Adds a call to those that may be made again, in place of the earliest if there are many."""
    calls[call] = None
    while len(calls) > _MOST_TO_COME:
        del calls[next(iter(calls))]


class _Opened(AbstractContextManager[CallId]):
    """Lists a call as open for the length of a block."""

    def __init__(
        self, calls: OpenCalls, accumulator: AccumulatorKey, new_call: Callable[[], CallId], *, may_come_again: bool
    ) -> None:
        self._calls = calls
        self._accumulator = accumulator
        self._new_call = new_call
        self._may_come_again = may_come_again

    def __enter__(self) -> CallId:
        with self._calls.numbering:
            self._call = self._new_call()
            self._calls.begin(self._accumulator, self._call)
        return self._call

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._calls.end(self._accumulator, self._call, error if self._may_come_again else None)


class RequestIds:
    """Gives ids to the calls of one client. Safe to use from several threads.

    The server knows calls that the client numbers and calls that its user numbers as those of two clients, so neither
    can be mistaken for the other. Users know an id as an integer: a number of their own as that number, which has up to
    64 bits; an id that the client gave as a longer one, which names the same call in every client.

    Attributes:
        client_id: The id of the client, which owns what is private to it.
        calls_id: The id of the client in the ids of its calls, from which nobody can tell `client_id`.
        open_calls: The calls whose averages have not arrived.
        pacing: Holds back contributions while many are on their way.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, client_id: str, clock: Callable[[], float] = lambda: 0.0) -> None:
        """Makes the ids of the client with this id, which no other client has. `clock` is monotonic, in seconds."""
        self.client_id = client_id
        self.clock = clock
        self.open_calls = OpenCalls()
        self.pacing = Pacing(clock)
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        # Names are public in lists, and errors show request ids; the id itself must be known to the server alone.
        self._public_id = _derived(client_id, b"names")
        self.calls_id = _derived(client_id, b"calls")
        self._chosen_id = f"{self.calls_id}-chosen"

    def new_call(self) -> CallId:
        """Returns the id of a new call."""
        with self.open_calls.numbering:
            return CallId(self.calls_id, next(self._numbers))

    def new_request_id(self) -> int:
        """Returns the id of a call that the user will make; see `OpenCalls.reserve`."""
        with self.open_calls.numbering:
            call = self.new_call()
            self.open_calls.reserve(call)
        return self.request_id(call)

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
        """Returns the default worker id: one for each client and thread; see `new_worker_id`."""
        try:
            worker_id: str = self._thread.worker_id
        except AttributeError:
            worker_id = new_worker_id()
            self._thread.worker_id = worker_id
        return worker_id

    def write(self, message: accumulator_pb2.RequestId, call: CallId, accumulator: AccumulatorKey) -> None:
        """Writes the id of a call on an accumulator to its message."""
        message.client_id, message.sequence = call
        if call.client_id in (self.calls_id, self._chosen_id):
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


def private_name(name: str, ids: RequestIds) -> str:
    """Returns a name that begins with `name` and that no other client uses."""
    return f"{name}-{ids.private_name()}"
