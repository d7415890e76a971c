"""Calls that have not ended: those that arrive again join them."""

from typing import Generic, TypeVar

from gradserve_server.accumulators.identity import RequestId

WorkT = TypeVar("WorkT")


class CallsUnderWay(Generic[WorkT]):
    """What calls with an id wait for, until it is there.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._work: dict[tuple[str, int], tuple[bytes, WorkT]] = {}

    def find(self, call: RequestId | None) -> WorkT | None:
        """Returns what the first call with this id waits for, None when there is none.

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
        """Notes what a call waits for."""
        if call is not None:
            self._work[call.client_id, call.sequence] = (call.fingerprint, work)

    def end(self, call: RequestId | None, work: WorkT) -> None:
        """Forgets what a call waited for. What a later call with the same id waits for stays."""
        if call is None:
            return
        key = (call.client_id, call.sequence)
        if key in self._work and self._work[key][1] is work:
            del self._work[key]
