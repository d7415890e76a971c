"""Buffers that are sent or filled one after the other, in as few system calls as possible."""

import socket
from array import array
from collections.abc import Iterable, Sequence

from gradserve.calls.progress import Progress

_MAX_BUFFERS = 1024
"""The most buffers of a system call (IOV_MAX)."""
_PIECE_BYTES = 1 << 20
"""The most bytes of a system call of which a progress is told."""


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
        """See `Buffers`; never more than one piece."""
        return super().next(_PIECE_BYTES if num_bytes is None else min(num_bytes, _PIECE_BYTES))

    def advance(self, num_bytes: int) -> None:
        """See `Buffers`.

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
