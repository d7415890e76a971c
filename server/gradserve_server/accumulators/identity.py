"""Request ids, the memory of calls that makes each count once, however often it is sent, and unfinished calls."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Reservation
from gradserve_server.storage.journal import IdWindow

RecordT = TypeVar("RecordT")

_RECORD_BYTES = 640
"""The measured memory of a remembered call."""
_CLIENT_BYTES = 1024
"""The memory of a remembered client, without its calls."""
_CHOSEN = "-chosen"
"""The suffix of the client_id of calls whose numbers the client's user has chosen."""


def owner_of(client_id: str) -> str:
    """Returns the client that makes calls with this id: it is also that of its lease."""
    return client_id.removesuffix(_CHOSEN)


@dataclass(frozen=True, slots=True)
class RequestId:
    """The id of one call of one client.

    Attributes:
        client_id: The id of the client.
        sequence: A number that grows with the calls of the client.
        fingerprint: A digest of the call's content, to detect an id that is reused for other content; empty if unknown,
            as for a call that an aggregator has answered.
        unanswered: Smaller numbers whose answers the client still awaits or may ask for again. It has the answers to
            all other smaller numbers.
        unanswered_since: If there are many of these, the first one; all later numbers count as unanswered, too.
    """

    client_id: str
    sequence: int
    fingerprint: bytes = b""
    unanswered: frozenset[int] = field(default=frozenset(), compare=False)
    unanswered_since: int | None = field(default=None, compare=False)

    @property
    def owner(self) -> str:
        """The client, whichever of its two ids the call has: see `RequestId.client_id` in the protos."""
        return owner_of(self.client_id)

    def acknowledges(self, sequence: int) -> bool:
        """Returns True if this call shows that the client has the answer to its call `sequence`."""
        since = self.unanswered_since
        is_early = sequence < self.sequence and (since is None or sequence < since)
        return is_early and sequence not in self.unanswered

    def check_content(self, fingerprint: bytes) -> None:
        """Checks that an earlier call with this id had the same content, if that is known.

        Raises:
            InvalidArgumentError: The earlier call had another fingerprint.
        """
        if fingerprint != self.fingerprint and fingerprint and self.fingerprint:
            raise self.other_content()

    def other_content(self) -> InvalidArgumentError:
        """Returns the error for a call whose id was used for other content."""
        return InvalidArgumentError(
            f"expected the same content in every call with request_id {self.client_id}:{self.sequence}, "
            "got a different one",
            field="request_id",
        )


@dataclass(frozen=True)
class CallRecord(Generic[RecordT]):
    """The outcome and the fingerprint of one call."""

    fingerprint: bytes
    record: RecordT


@dataclass(eq=False)
class ClientWindow(Generic[RecordT]):
    """The calls of one client that are remembered.

    Attributes:
        calls: The latest calls, by number.
        floor: The greatest forgotten number. An unknown number up to it may have been used before.
        last_used: The time at which the client was last heard of.
        num_running: The number of its calls that have not ended.
    """

    calls: IdWindow[int, CallRecord[RecordT]]
    floor: int = -1
    last_used: float = 0.0
    num_running: int = 0


class CallMemory(Generic[RecordT]):
    """Remembers the outcomes of each client's latest calls.

    Keeps a sliding window of `window` calls per client, as Kafka does for idempotent producers. A call older than the
    window is refused rather than carried out a second time. Clients can be forgotten after a time of silence; while
    `max_clients` are remembered, new ones are refused.

    Its contents depend only on the order of `remember` and `forget`; only the times of silence depend on the clock.
    """

    def __init__(
        self, *, window: int, max_clients: int, silence: float, clock: Callable[[], float], bookkeeping: Reservation
    ) -> None:
        """Takes its limits and its budget.

        Args:
            window: The number of calls of a client to remember.
            max_clients: The number of clients to remember.
            silence: The seconds of silence after which a client may be forgotten.
            clock: A monotonic clock, in seconds.
            bookkeeping: The budget of bytes.
        """
        self._reservation = bookkeeping.another()
        self._closed = False
        self._window = window
        self._max_clients = max_clients
        self._silence = silence
        self._clock = clock
        self._clients: OrderedDict[str, ClientWindow[RecordT]] = OrderedDict()

    def recall(self, call: RequestId | None) -> RecordT | None:
        """Returns the record of a known call; None for a new one.

        Raises:
            AbortedError: The call is older than the remembered ones.
            InvalidArgumentError: The id was used by a call with another fingerprint.
        """
        known = self._clients.get(call.client_id) if call is not None else None
        if call is None or known is None:
            return None
        found = known.calls.get(call.sequence)
        if found is None:
            if call.sequence <= known.floor:
                raise AbortedError(
                    f"request_id {call.client_id}:{call.sequence} is older than the {self._window} latest that "
                    f"are remembered; the call was not carried out",
                    field="request_id.sequence",
                    code="GS_REQUEST_FORGOTTEN",
                )
            return None
        call.check_content(found.fingerprint)
        self._heard_of(call.client_id)
        return found.record

    def knows(self, call: RequestId) -> tuple[RecordT | None, bool]:
        """Returns the record of a call, and whether it may have been forgotten. Does not renew its client."""
        window = self._clients.get(call.client_id)
        if window is None:
            return None, False
        found = window.calls.get(call.sequence)
        return (None, call.sequence <= window.floor) if found is None else (found.record, False)

    def is_heard_of(self, client_id: str, seconds: float) -> bool:
        """Returns True if a client has a call under way, or had one within the last seconds."""
        window = self._clients.get(client_id)
        if window is None:
            return False
        return bool(window.num_running) or window.last_used > self._clock() - seconds

    def windows(self) -> dict[str, ClientWindow[RecordT]]:
        """Returns the windows of all clients, by their ids."""
        return {client_id: window for client_id, window in self._clients.items() if window.calls}

    def restore(self, client_id: str, floor: int, calls: Iterable[tuple[int, CallRecord[RecordT]]]) -> None:
        """Remembers the calls of a client, oldest first, and the greatest number that was forgotten."""
        window = self._heard_of(client_id)
        window.floor = floor
        for sequence, record in calls:
            window.calls.remember(sequence, record)
        self._add_bytes(_RECORD_BYTES * len(window.calls))

    def silent(self, call: RequestId) -> tuple[str, ...]:
        """Returns the clients to forget when a call arrives: silent ones if its client is new, otherwise none."""
        if call.client_id in self._clients:
            return ()
        oldest_allowed = self._clock() - self._silence
        found = []
        for client_id, window in self._clients.items():
            if window.last_used > oldest_allowed:
                break
            if not window.num_running:
                found.append(client_id)
        return tuple(found)

    def forget(self, client_ids: Iterable[str]) -> None:
        """Forgets clients with all their calls."""
        for client_id in client_ids:
            window = self._clients.pop(client_id, None)
            if window is not None:
                self._add_bytes(-_CLIENT_BYTES - _RECORD_BYTES * len(window.calls))

    def close(self) -> None:
        """Forgets everything. Calls in flight may still be remembered, without counting in the budget."""
        self._closed = True
        self._clients.clear()
        self._reservation.settle(0)

    def room_for(self, *calls: RequestId | None) -> AbstractContextManager[None]:
        """Makes room to remember the outcomes of calls at the end of a block.

        Entering it raises ResourceExhaustedError if too many clients are remembered already.
        """
        return _Running(self, calls, self.begin)

    def waiting(self, *calls: RequestId | None) -> AbstractContextManager[None]:
        """Notes for the duration of a block that remembered calls wait, so that their clients are not silent."""
        return _Running(self, calls, self._go_on)

    def begin(self, call: RequestId) -> ClientWindow[RecordT]:
        """Notes that a call has begun; returns the window of its client.

        Raises:
            ResourceExhaustedError: Too many clients are remembered already, or there is no memory for another call.
        """
        known = self._clients.get(call.client_id)
        if known is None or len(known.calls) < self._window:
            # Memory is counted when the outcome is remembered, which must not fail.
            self._reservation.check(_RECORD_BYTES + (_CLIENT_BYTES if known is None else 0))
        if call.client_id not in self._clients and len(self._clients) >= self._max_clients:
            raise ResourceExhaustedError(
                f"too many clients use request ids here: {self._max_clients} allowed",
                field="request_id.client_id",
                code="GS_TOO_MANY",
            )
        window = known or self._heard_of(call.client_id)
        window.num_running += 1
        return window

    def _go_on(self, call: RequestId) -> ClientWindow[RecordT] | None:
        """Notes that a remembered call goes on; returns the window of its client, None if that was forgotten."""
        window = self._clients.get(call.client_id)
        if window is not None:
            window.num_running += 1
        return window

    def end(self, call: RequestId, window: ClientWindow[RecordT]) -> None:
        """Notes that a call has ended."""
        window.num_running -= 1
        if self._clients.get(call.client_id) is window:
            self._heard_of(call.client_id)
            if window.floor < 0 and not window.num_running and not window.calls:
                # Clients whose calls all fail take up no place.
                self.forget([call.client_id])

    def remember(self, call: RequestId | None, record: RecordT) -> None:
        """Remembers the outcome of a call in the place of the client's oldest."""
        if call is None:
            return
        window = self._clients.get(call.client_id) or self._heard_of(call.client_id)
        num_before = len(window.calls)
        forgotten = window.calls.remember(call.sequence, CallRecord(call.fingerprint, record))
        self._add_bytes(_RECORD_BYTES * (len(window.calls) - num_before))
        if forgotten:
            window.floor = max(window.floor, *forgotten)

    def _add_bytes(self, amount: int) -> None:
        if not self._closed:
            self._reservation.settle(self._reservation.used + amount)

    def _heard_of(self, client_id: str) -> ClientWindow[RecordT]:
        """Returns the window of a client, marked as the one last heard of."""
        window = self._clients.get(client_id)
        if window is None:
            window = self._clients[client_id] = ClientWindow(IdWindow(self._window))
            self._add_bytes(_CLIENT_BYTES)
        window.last_used = self._clock()
        self._clients.move_to_end(client_id)
        return window


class _Running(AbstractContextManager[None]):
    """The context of calls in flight; those without an id are ignored."""

    __slots__ = ("_begin", "_begun", "_calls", "_memory")

    def __init__(
        self,
        memory: CallMemory[Any],
        calls: Sequence[RequestId | None],
        begin: Callable[[RequestId], ClientWindow[Any] | None],
    ) -> None:
        self._memory = memory
        self._calls = calls
        self._begin = begin
        self._begun: list[tuple[RequestId, ClientWindow[Any]]] = []

    def __enter__(self) -> None:
        try:
            for call in self._calls:
                if call is not None and (window := self._begin(call)) is not None:
                    self._begun.append((call, window))
        except ResourceExhaustedError:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for call, window in self._begun:
            self._memory.end(call, window)


WorkT = TypeVar("WorkT")


class CallsUnderWay(Generic[WorkT]):
    """The work of unfinished calls with ids, which repeated calls join.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._work: dict[tuple[str, int], tuple[bytes, WorkT]] = {}

    def find(self, call: RequestId | None) -> WorkT | None:
        """Returns the work of the first call with this id; None if there is none.

        Raises:
            InvalidArgumentError: That call has another fingerprint.
        """
        if call is None:
            return None
        found = self._work.get((call.client_id, call.sequence))
        if found is None:
            return None
        fingerprint, work = found
        call.check_content(fingerprint)
        return work

    def begin(self, call: RequestId | None, work: WorkT) -> None:
        """Records the work of a call."""
        if call is not None:
            self._work[call.client_id, call.sequence] = (call.fingerprint, work)

    def end(self, call: RequestId | None, work: WorkT) -> None:
        """Forgets the work of a call, unless a later call with the same id has begun other work."""
        if call is None:
            return
        key = (call.client_id, call.sequence)
        if key in self._work and self._work[key][1] is work:
            del self._work[key]
