"""Buffers that are sent or filled one after the other, in as few system calls as possible."""

import socket
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_MAX_BUFFERS = 1024
"""The most buffers of a system call (IOV_MAX)."""


class Buffers:
    """The part of several buffers that has not been sent or filled.

    Attributes:
        ancillary: What to send along with the first bytes.
    """

    def __init__(self, buffers: Iterable[bytes | memoryview], descriptor: int | None = None) -> None:
        """Takes buffers of bytes, of which some may be empty, and a descriptor to send along."""
        self.ancillary: Sequence[tuple[int, int, array[int]]] = ()
        if descriptor is not None:
            self.ancillary = ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor])),)
        self._rest = [memoryview(each) for each in buffers if len(each)]
        self._first = 0

    def __bool__(self) -> bool:
        return self._first < len(self._rest)

    def next(self, num_bytes: int | None = None) -> list[memoryview]:
        """Returns what comes next, for one system call: at most `num_bytes`, None for any number."""
        buffers = list(islice(self._rest, self._first, self._first + _MAX_BUFFERS))
        if num_bytes is None:
            return buffers
        limited = []
        for each in buffers:
            limited.append(each[:num_bytes])
            num_bytes -= len(limited[-1])
            if not num_bytes:
                break
        return limited

    def advance(self, num_bytes: int) -> None:
        """Takes away the next bytes, which were sent or filled."""
        self.ancillary = ()
        while num_bytes:
            current = self._rest[self._first]
            if num_bytes < len(current):
                self._rest[self._first] = current[num_bytes:]
                return
            num_bytes -= len(current)
            self._first += 1
