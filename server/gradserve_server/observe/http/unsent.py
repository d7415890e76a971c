"""The bodies of answers that their clients have not read."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradserve_server.errors import ResourceExhaustedError

_MOST_BYTES = 64 << 20


class UnsentBodies:
    """Bounds the memory of the answers that are being sent. One that goes to many clients counts once."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """Takes the most bytes."""
        self._most_bytes = most_bytes
        self._uses: dict[int, int] = {}
        self.num_bytes = 0

    @contextmanager
    def hold(self, body: bytes) -> Iterator[None]:
        """Counts a body until the end of the block.

        Raises:
            ResourceExhaustedError: There are too many bytes that clients do not read.
        """
        key = id(body)  # it lives as long as the block
        if key not in self._uses:
            if self.num_bytes + len(body) > self._most_bytes and self._uses:
                raise ResourceExhaustedError("too many answers are being sent; try again later")
            self.num_bytes += len(body)
        self._uses[key] = self._uses.get(key, 0) + 1
        try:
            yield
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.num_bytes -= len(body)
