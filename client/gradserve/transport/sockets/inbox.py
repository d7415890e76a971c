"""What has arrived on a connection."""

import os
from collections.abc import Iterable

import grpc

from gradserve.transport.sockets.steps import Receive
from gradserve.wire.frames import FrameError, FrameKind

_NUM_BYTES = 1 << 15
"""Room for a small reply, header and message, so that one system call receives it."""
_FAREWELL = bytes((FrameKind.REPLY, grpc.StatusCode.UNAVAILABLE.value[0]))
"""How the frame begins with which a server ends a connection."""


class Inbox:
    """The bytes that have arrived on a connection, until a frame takes them.

    Attributes:
        num_bytes: How many there are.
    """

    def __init__(self, *, takes_descriptors: bool) -> None:
        """Takes whether descriptors may come with the bytes."""
        self.num_bytes = 0
        self._start = 0
        self._memory = memoryview(bytearray(_NUM_BYTES))
        self._descriptors: list[int] = []
        self._received_descriptors = self._descriptors if takes_descriptors else None

    def more(self, num_bytes: int) -> Receive:
        """Returns the step after which there are at least so many bytes; `add` must follow it."""
        if self._start:
            self._memory[: self.num_bytes] = self._memory[self._start : self._start + self.num_bytes]
            self._start = 0
        return Receive(self._memory[self.num_bytes :], num_bytes - self.num_bytes, self._received_descriptors)

    def add(self, num_bytes: int) -> None:
        """Notes how many bytes a step received."""
        self.num_bytes += num_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Takes the first bytes, or all if there are fewer. They are valid until the next step."""
        start = self._start
        if num_bytes < self.num_bytes:
            self.num_bytes -= num_bytes
            self._start = end = start + num_bytes
        else:
            end = start + self.num_bytes
            self.num_bytes = self._start = 0
        return self._memory[start:end]

    def fill(self, buffers: Iterable[memoryview]) -> list[memoryview]:
        """Moves what there is into buffers; returns those, or parts of them, that remain to be filled."""
        rest = []
        for each in buffers:
            taken = self.take(len(each))
            each[: len(taken)] = taken
            if len(taken) < len(each):
                rest.append(each[len(taken) :])
        return rest

    def take_descriptors(self) -> list[int]:
        """Takes all descriptors; the caller closes them."""
        taken = self._descriptors[:]
        self._descriptors.clear()
        return taken

    @property
    def is_empty(self) -> bool:
        """True if nothing has come after the frames that were taken."""
        return not self.num_bytes and not self._descriptors

    def check_rest(self) -> None:
        """Checks that nothing has come after the frames that were taken, but the farewell of a server that stops.

        Raises:
            FrameError: Something else has.
        """
        rest = bytes(self._memory[self._start : self._start + min(self.num_bytes, len(_FAREWELL))])
        if self._descriptors or not _FAREWELL.startswith(rest):
            raise FrameError(f"expected nothing after a REPLY, got {self.num_bytes} bytes")

    def close(self) -> None:
        """Closes descriptors that nobody has taken."""
        for each in self.take_descriptors():
            os.close(each)
