"""The turns of clients that would create parameters of one name at the same time, so that one of them sends values."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradserve_server.errors import DeadlineExceededError, ServiceError
from gradserve_server.resources.registry import ResourceKey

_SHORTEST_SECONDS = 10.0
"""The time for which a creator has the turn, whatever the size of its values."""
_SLOWEST_BYTES = 20e6
"""The bytes per second of the slowest creator for which the others wait. That time comes on top."""
_MOST_TURNS = 1024


@dataclass(frozen=True)
class _Turn:
    """The turn of one client to create parameters.

    Attributes:
        creator: The client's text.
        until: The time at which somebody else may take the turn.
        is_over: Resolved when it has ended before.
    """

    creator: str
    until: float
    is_over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Creators:
    """Gives one client after the other the turn to create parameters of a name. Used on the event loop only.

    A turn ends when its creator has created the parameters or failed to, or after 10 s and the time that the values
    take at 20 MB/s: the creator may have died. At most 1024 names have a turn at once; for further ones, every client
    has the turn at once.
    """

    def __init__(self) -> None:
        self._turns: dict[ResourceKey, _Turn] = {}
        self._closed: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._turns)

    async def turn(
        self, key: ResourceKey, creator: str, num_bytes: int, exists: Callable[[], bool], timeout: float | None
    ) -> None:
        """Returns when the parameters exist, or it is this client's turn to create them.

        Args:
            key: Their name.
            creator: A text that no other client uses. The turn is the same if the client asks again.
            num_bytes: The size of the values that it would send.
            exists: Returns True if the parameters exist.
            timeout: The seconds to wait; None for no limit.

        Raises:
            DeadlineExceededError: Another client had the turn all the time.
            ServiceError: What `close` was called with.
        """
        try:
            async with asyncio.timeout(timeout):
                while not exists() and not self._take(key, creator, num_bytes):
                    turn = self._turns[key]
                    remaining = max(turn.until - asyncio.get_running_loop().time(), 0.0)
                    await asyncio.wait([turn.is_over], timeout=remaining)
                    if self._closed is not None:
                        raise self._closed
        except TimeoutError:
            raise DeadlineExceededError(
                f"another client was about to create parameters {str(key)!r}, and has not done so within {timeout:g} s",
                field="parameters.name",
                code="GS_NO_CREATOR",
            ) from None

    def end(self, key: ResourceKey, creator: str | None = None) -> None:
        """Ends the turn of a creator, or any turn if that is None; the next client has it then."""
        turn = self._turns.get(key)
        if turn is not None and creator in (None, turn.creator):
            del self._turns[key]
            turn.is_over.set_result(None)

    def close(self, error: ServiceError) -> None:
        """Ends every wait with an error."""
        self._closed = error
        for key in list(self._turns):
            self.end(key)

    def _take(self, key: ResourceKey, creator: str, num_bytes: int) -> bool:
        now = asyncio.get_running_loop().time()
        turn = self._turns.get(key)
        if turn is not None and turn.until > now and turn.creator != creator:
            return False
        self.end(key)
        if len(self._turns) >= _MOST_TURNS:
            for other in [other for other, turn in self._turns.items() if turn.until <= now]:
                self.end(other)
        if len(self._turns) < _MOST_TURNS:
            self._turns[key] = _Turn(creator, now + _SHORTEST_SECONDS + num_bytes / _SLOWEST_BYTES)
        return True
