"""Makes a call count once, however often it is sent."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class RequestId:
    """Names one call of one client.

    Attributes:
        client_id: Unique to the client.
        sequence: Unique among its calls, and growing.
        fingerprint: Digest of what the call says, to notice an id used for something else.
        unanswered: Smaller sequence numbers whose answers the client still waits for, or may ask for again. The
            answers to all other smaller ones have arrived.
    """

    client_id: str
    sequence: int
    fingerprint: bytes = b""
    unanswered: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.client_id:
            raise InvalidArgumentError("expected a client_id, got an empty one", field="request_id.client_id")


@dataclass
class _Window(Generic[RecordT]):
    records: OrderedDict[int, tuple[bytes, RecordT]] = field(default_factory=OrderedDict)
    floor: int = -1
    """The greatest number that was forgotten: an unknown one at or below it may have been seen."""
    last_used: float = 0.0


class CallMemory(Generic[RecordT]):
    """Remembers what became of the latest calls of every client.

    A sliding window, as Kafka keeps for idempotent producers: of each client the latest `window` calls. A call
    that is older than what is remembered is refused rather than carried out a second time. Clients are
    forgotten after a time of silence; while more than `max_clients` are remembered, new ones are refused.
    """

    def __init__(self, *, window: int, max_clients: int, silence: float, clock: Callable[[], float]) -> None:
        """Takes the `silence` in seconds after which a client may be forgotten, by a monotonic `clock`."""
        self._window = window
        self._max_clients = max_clients
        self._silence = silence
        self._clock = clock
        self._clients: OrderedDict[str, _Window[RecordT]] = OrderedDict()

    def recall(self, call: RequestId | None) -> RecordT | None:
        """Returns the record of a call that was seen before, None for a new one.

        Raises:
            AbortedError: The call is older than what is remembered.
            InvalidArgumentError: The id was used by a call with another fingerprint.
            ResourceExhaustedError: Too many clients are remembered to remember a new one.
        """
        if call is None:
            return None
        known = self._clients.get(call.client_id)
        if known is None:
            self._make_room()
            return None
        self._touch(call.client_id, known)
        entry = known.records.get(call.sequence)
        if entry is None:
            if call.sequence <= known.floor:
                raise AbortedError(
                    f"request_id {call.client_id}:{call.sequence} is older than the {self._window} latest that "
                    f"are remembered; the call was not carried out",
                    field="request_id.sequence",
                )
            return None
        fingerprint, record = entry
        if fingerprint != call.fingerprint:
            raise InvalidArgumentError(
                f"expected the same content in every call with request_id {call.client_id}:{call.sequence}, "
                "got a different one",
                field="request_id",
            )
        return record

    def remember(self, call: RequestId | None, record: RecordT) -> None:
        """Keeps the record of a new call, at the cost of the client's oldest."""
        if call is None:
            return
        window = self._clients.setdefault(call.client_id, _Window())
        self._touch(call.client_id, window)
        window.records[call.sequence] = (call.fingerprint, record)
        while len(window.records) > self._window:
            forgotten, _ = window.records.popitem(last=False)
            window.floor = max(window.floor, forgotten)

    def replace(self, call: RequestId | None, record: RecordT, outcome: RecordT) -> None:
        """Replaces `record`, if it still is that of the call, by that of the call's end."""
        if call is not None and self._holds(call, record):
            self._clients[call.client_id].records[call.sequence] = (call.fingerprint, outcome)

    def forget(self, call: RequestId | None, record: RecordT) -> None:
        """Drops `record`, if it still is that of the call: the next call with its id is new.

        For a call that had no effect. The record of a later call with the same id stays: whoever ends late must not
        erase what another has begun.
        """
        if call is None or not self._holds(call, record):
            return
        window = self._clients[call.client_id]
        del window.records[call.sequence]
        if not window.records and window.floor < 0:
            # As if the client had never called: those that come, give up and go take no place.
            del self._clients[call.client_id]

    def _holds(self, call: RequestId, record: RecordT) -> bool:
        window = self._clients.get(call.client_id)
        entry = window.records.get(call.sequence) if window is not None else None
        return entry is not None and entry[1] is record

    def _touch(self, client_id: str, window: _Window[RecordT]) -> None:
        window.last_used = self._clock()
        self._clients.move_to_end(client_id)

    def _make_room(self) -> None:
        oldest_allowed = self._clock() - self._silence
        while self._clients:
            client_id, window = next(iter(self._clients.items()))
            if window.last_used > oldest_allowed:
                break
            del self._clients[client_id]
        if len(self._clients) >= self._max_clients:
            raise ResourceExhaustedError(
                f"too many clients use request ids here: {self._max_clients} allowed", field="request_id.client_id"
            )
