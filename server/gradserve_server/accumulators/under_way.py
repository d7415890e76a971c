"""Calls that have not ended, which repeated calls join."""

from typing import Generic, TypeVar

from gradserve_server.accumulators.identity import RequestId

WorkT = TypeVar("WorkT")


class CallsUnderWay(Generic[WorkT]):
    """The work that unfinished calls with an id wait for.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._work: dict[tuple[str, int], tuple[bytes, WorkT]] = {}

    def find(self, call: RequestId | None) -> WorkT | None:
        """Returns the work that the first call with this id waits for, None if there is none.

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
        """Records the work that a call waits for."""
        if call is not None:
            self._work[call.client_id, call.sequence] = (call.fingerprint, work)

    def end(self, call: RequestId | None, work: WorkT) -> None:
        """Forgets the work of a call, unless a later call with the same id has begun other work."""
        if call is None:
            return
        key = (call.client_id, call.sequence)
        if key in self._work and self._work[key][1] is work:
            del self._work[key]
