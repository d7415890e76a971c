"""Strands: further sockets of a connection, over which large payloads are split."""

import secrets

from gradserve.wire.frames import MAX_STRANDS, FrameError
from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.resources.quotas import Quota
from gradserve_server.rpc.listeners.sockets.stream import FrameStream

_KEY_BYTES = 16


class Strands:
    """The strands of one connection, which belong to it."""

    def __init__(self, quota: Quota) -> None:
        """Takes the quota of the strands of all connections."""
        self._quota = quota
        self._streams: dict[int, FrameStream] = {}

    def add(self, number: int, stream: FrameStream) -> None:
        """Takes over a stream.

        Raises:
            InvalidArgumentError: The number is not one of a strand, or taken.
            ResourceExhaustedError: There are too many strands.
        """
        if not 0 < number <= MAX_STRANDS:
            raise InvalidArgumentError(f"expected 1 to {MAX_STRANDS}, got {number}", field="strand")
        if number in self._streams:
            raise InvalidArgumentError(f"strand {number} is there already", field="strand")
        self._quota.acquire()
        self._streams[number] = stream

    def first(self, count: int) -> list[FrameStream]:
        """Returns the first strands.

        Raises:
            FrameError: There are not so many.
        """
        try:
            return [self._streams[number] for number in range(1, count + 1)]
        except KeyError as error:
            raise FrameError(f"expected a call over strands that are open, strand {error} is not") from None

    def close(self) -> None:
        """Closes all of them."""
        while self._streams:
            self._streams.popitem()[1].close()
            self._quota.release()


class StrandKeys:
    """The keys with which sockets become strands of connections.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._strands: dict[bytes, Strands] = {}

    def issue(self, strands: Strands) -> bytes:
        """Returns a key to the strands of a connection, until it is revoked."""
        key = secrets.token_bytes(_KEY_BYTES)
        self._strands[key] = strands
        return key

    def revoke(self, key: bytes) -> None:
        """Forgets a key."""
        self._strands.pop(key, None)

    def strands_of(self, key: bytes) -> Strands:
        """Returns the strands of a connection.

        Raises:
            NotFoundError: There is no such key (any more).
        """
        strands = self._strands.get(key)
        if strands is None:
            raise NotFoundError("no such connection: it has ended, or belongs to another server", field="strand_key")
        return strands
