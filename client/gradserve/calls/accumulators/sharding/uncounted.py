"""Staged gradients that do not count, of which servers have yet to be told."""

from collections.abc import Collection, Iterable
from typing import TypeAlias

from gradserve.calls.open_calls import AccumulatorKey, CallId
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2

_MOST_WITHDRAWN = 1024
_Place: TypeAlias = tuple[AccumulatorKey, int]
"""An accumulator, and the index of a server."""


class Uncounted:
    """What one client tells servers with the next gradient: which of its earlier ones they may forget.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._withdrawn: dict[_Place, dict[CallId, None]] = {}
        self._asking: dict[_Place, None] = {}

    def withdraw(self, accumulator: AccumulatorKey, targets: Iterable[int], call: CallId) -> None:
        """Notes that the gradient of a call, which was staged on some servers, does not count, as the home has said."""
        for target in targets:
            calls = self._withdrawn.setdefault((accumulator, target), {})
            calls[call] = None
            for earliest in list(calls)[:-_MOST_WITHDRAWN]:
                calls.pop(earliest, None)

    def address(self, staging: messages_pb2.StageGradientRequest, accumulator: AccumulatorKey, target: int) -> None:
        """Writes to a request which gradients a server may forget; not its own, which may count this time."""
        calls = self._withdrawn.get((accumulator, target))
        if calls:
            client_id = staging.request_id.client_id
            calls.pop(CallId(client_id, staging.request_id.sequence), None)
            staging.withdrawn.extend([each.sequence for each in list(calls) if each.client_id == client_id])

    def answered(
        self,
        staging: messages_pb2.StageGradientRequest,
        reply: messages_pb2.StageGradientResponse,
        accumulator: AccumulatorKey,
        target: int,
    ) -> None:
        """Notes that a server has answered a request."""
        place = (accumulator, target)
        calls = self._withdrawn.get(place)
        if calls is not None:
            for number in staging.withdrawn:
                calls.pop(CallId(staging.request_id.client_id, number), None)
            if not calls:
                self._withdrawn.pop(place, None)
        if reply.has_old_gradients:
            self._asking[place] = None

    def take_asking(self, accumulator: AccumulatorKey) -> Collection[int]:
        """Returns the servers that ask whether old gradients count, since the last call."""
        found = [target for of, target in list(self._asking) if of == accumulator]
        for target in found:
            self._asking.pop((accumulator, target), None)
        return found
