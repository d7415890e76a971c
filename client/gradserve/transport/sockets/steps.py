"""The steps of a conversation on a socket, which a transport performs, and the buffers that they move."""

import os
import socket
from array import array
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc

from gradserve.calls.exchange import Progress
from gradserve_protocol.frames import FrameError, FrameKind

_MAX_BUFFERS = 1024
"""The most buffers of a system call (IOV_MAX)."""
_PIECE_BYTES = 1 << 20
"""The most bytes of a system call if progress is reported."""
_NUM_BYTES = 1 << 15
"""Room for a small reply, header and message, so that one system call receives it."""
_FAREWELL = bytes((FrameKind.REPLY, grpc.StatusCode.UNAVAILABLE.value[0]))
"""The first bytes of the frame with which a server ends a connection."""
T = TypeVar("T")


class Send(NamedTuple):
    """Sends buffers, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        descriptor: A descriptor to send with the first byte.
        on_strands: What to send on strands at the same time.
        progress: Told how many bytes were sent.
    """

    buffers: Sequence[bytes | memoryview]
    descriptor: int | None = None
    on_strands: Sequence[Sequence[bytes | memoryview]] = ()
    progress: Progress | None = None


class Receive(NamedTuple):
    """Receives what comes, for which the server may have to work first. Answered by the number of bytes.

    Attributes:
        memory: Where to put it.
        at_least: The number of bytes to wait for.
        descriptors: Gets the descriptors that come with the bytes; None if none may come.
    """

    memory: memoryview
    at_least: int
    descriptors: list[int] | None = None


class Fill(NamedTuple):
    """Fills buffers with the rest of a frame, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        payload_bytes: The size of the payload that begins here, for which there is more time.
        on_strands: The buffers to fill from strands at the same time.
        progress: Told how many bytes were received.
    """

    buffers: Sequence[memoryview]
    payload_bytes: int = 0
    on_strands: Sequence[Sequence[memoryview]] = ()
    progress: Progress | None = None


Step: TypeAlias = Send | Receive | Fill
Conversation: TypeAlias = Generator[Step, Any, T]


class Buffers:
    """The part of several buffers that has not been sent or filled.

    Attributes:
        left: The buffers that are left; none of them is empty.
        ancillary: What to send along with the first bytes.
    """

    def __init__(self, buffers: Iterable[bytes | memoryview], descriptor: int | None = None) -> None:
        """Takes buffers of bytes, of which some may be empty, and a descriptor to send along."""
        self.left = [each for each in buffers if each]
        self.ancillary: Sequence[tuple[int, int, array[int]]] = ()
        if descriptor is not None:
            self.ancillary = ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor])),)

    def __bool__(self) -> bool:
        return bool(self.left)

    def next(self, num_bytes: int | None = None) -> list[bytes | memoryview]:
        """Returns what comes next, for one system call: at most `num_bytes`, None for any number."""
        buffers = self.left[:_MAX_BUFFERS]
        if num_bytes is None:
            return buffers
        limited: list[bytes | memoryview] = []
        for each in buffers:
            limited.append(memoryview(each)[:num_bytes])
            num_bytes -= len(limited[-1])
            if not num_bytes:
                break
        return limited

    def advance(self, num_bytes: int) -> None:
        """Takes away the next bytes, which were sent or filled."""
        self.ancillary = ()
        num_done = 0
        for each in self.left:
            if num_bytes < len(each):
                self.left[num_done] = memoryview(each)[num_bytes:]
                break
            num_bytes -= len(each)
            num_done += 1
        del self.left[:num_done]


class ReportedBuffers(Buffers):
    """Buffers that tell how many bytes were sent or filled, and are moved piece by piece for this."""

    def __init__(
        self, buffers: Iterable[bytes | memoryview], progress: Progress, descriptor: int | None = None
    ) -> None:
        super().__init__(buffers, descriptor)
        self._progress = progress

    def next(self, num_bytes: int | None = None) -> list[bytes | memoryview]:
        return super().next(_PIECE_BYTES if num_bytes is None else min(num_bytes, _PIECE_BYTES))

    def advance(self, num_bytes: int) -> None:
        """Takes away the next bytes, and reports their number to the progress.

        Raises:
            CallbackError: The callback of the progress has raised an exception.
        """
        super().advance(num_bytes)
        self._progress.moved(num_bytes)


def buffers_of(
    buffers: Iterable[bytes | memoryview], progress: Progress | None, descriptor: int | None = None
) -> Buffers:
    """Returns buffers to send or fill, which tell `progress` about it if there is one."""
    if progress is None:
        return Buffers(buffers, descriptor)
    return ReportedBuffers(buffers, progress, descriptor)


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
