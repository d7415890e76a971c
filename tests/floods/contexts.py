"""Contexts of calls without a connection."""

from typing import Any, cast

from gradserve_server.rpc.listeners.grpc.calls import Context


class OneCall:
    """One call of a client."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._endings: list[Any] = []

    @property
    def context(self) -> Context:
        """The call as gRPC shows it."""
        return cast("Context", self)

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, ending: Any) -> None:
        self._endings.append(ending)

    def end(self) -> None:
        for each in self._endings:
            each(self)
