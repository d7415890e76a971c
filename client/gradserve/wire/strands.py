"""Strands: further sockets of a connection, over which large payloads are split. docs/sockets.md specifies them."""

from collections.abc import Sequence
from typing import TypeVar

from gradserve.wire.frames import aligned

BufferT = TypeVar("BufferT", bytes | memoryview, memoryview)

MAX_STRANDS = 15
MIN_SPLIT_BYTES = 1 << 20
"""The least payload that is split."""


def shares(num_bytes: int, num_strands: int) -> list[int]:
    """Returns the sizes of the parts of a payload: that on the connection's own socket, then those on its strands.

    The last ones may be empty. There is one part only if the payload is too small to be split.
    """
    if not num_strands or num_bytes < MIN_SPLIT_BYTES:
        return [num_bytes]
    share = aligned(-(-num_bytes // (num_strands + 1)))
    return [max(min(share, num_bytes - index * share), 0) for index in range(num_strands + 1)]


def split(buffers: Sequence[BufferT], num_strands: int) -> list[list[BufferT]]:
    """Returns the parts of a payload, which buffers hold one after the other."""
    rest = list(reversed(buffers))
    parts = []
    for num_bytes in shares(sum(map(len, buffers)), num_strands):
        part: list[BufferT] = []
        while num_bytes:
            buffer = rest.pop()
            if len(buffer) > num_bytes:
                whole = memoryview(buffer)
                rest.append(whole[num_bytes:])
                buffer = whole[:num_bytes]
            part.append(buffer)
            num_bytes -= len(buffer)
        parts.append(part)
    return parts
