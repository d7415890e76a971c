"""Frames on a server's sockets: headers, segments, metadata, strands, and buffers to move. See docs/sockets.md."""

import socket
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain
from struct import Struct, pack
from typing import NamedTuple, Self, TypeAlias, TypeVar

PROTOCOL = 0x31535247
"""The number of a HELLO frame: "GRS1"."""

HEADER_BYTES = 32
MAX_NAME_BYTES = 1024
ALIGNMENT = 64
"""Tensors and segments begin at multiples of this, so that every array is aligned, in cache lines of its own."""
MAX_SEGMENTS = 1 << 18
"""Twice the most tensors of a message."""

_HEADER = Struct("<BBHIQQQ")
_SEGMENT = Struct("<QQQQ")
SEGMENT_BYTES = _SEGMENT.size
_MAX_BUFFERS = 1024
"""The most buffers of a system call (IOV_MAX)."""


class FrameError(ValueError):
    """A malformed frame, or one that the protocol forbids here."""


class FrameKind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1
    """The first frame of a client: its message is a Hello with the ticket, its number is PROTOCOL."""
    CALL = 2
    """A call: method, request and payload. `number` is the time limit in microseconds; 0 for none."""
    REPLY = 3
    """The answer to HELLO, CALL, REGION or GPU_REGION. `code` is a gRPC status; the message is the response, or a
    google.rpc.Status."""
    REGION = 4
    """Hands over a memory region, whose descriptor comes with the frame. `number` is the sender's number for it, `size`
    its bytes."""
    DROP = 5
    """The sender's region `number` is no longer in use."""
    RELEASE = 6
    """The client has finished `size` reads of the server's region `number`."""
    GPU_REGION = 7
    """Hands over an allocation on the server's GPU: the message is a GpuRegion. `number` is the client's number for it,
    `size` its bytes."""


# Looking up an enumeration member takes long in Python 3.11.
CALL, REPLY = FrameKind.CALL, FrameKind.REPLY

_KINDS = {int(kind): kind for kind in FrameKind}
_WITH_SEGMENTS = (CALL, REPLY)


class FrameHeader(NamedTuple):
    """The header of a frame.

    Attributes:
        kind: The purpose of the frame.
        code: The gRPC status of a REPLY.
        name_bytes: The length of the method's name that follows.
        message_bytes: The length of the message that follows the segments.
        payload_bytes: The number of bytes that follow the message.
        number: See `FrameKind`.
        size: The number of segments of a CALL or REPLY; otherwise see `FrameKind`.
    """

    kind: FrameKind
    code: int = 0
    name_bytes: int = 0
    message_bytes: int = 0
    payload_bytes: int = 0
    number: int = 0
    size: int = 0

    def pack(self) -> bytes:
        """Returns the header as it is sent."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Self:
        """Reads a header.

        Raises:
            FrameError: The kind is unknown, or a name or a table of segments is too long.
        """
        kind, *others = _HEADER.unpack(data)
        if kind not in _KINDS:
            raise FrameError(f"expected a known kind of frame, got {kind}")
        header = cls(_KINDS[kind], *others)
        if header.name_bytes > MAX_NAME_BYTES:
            raise FrameError(f"expected a name of at most {MAX_NAME_BYTES} bytes, got {header.name_bytes}")
        if header.size > MAX_SEGMENTS and header.num_segments:
            raise FrameError(f"expected at most {MAX_SEGMENTS} segments, got {header.num_segments}")
        return header

    @property
    def num_segments(self) -> int:
        """The number of segments that follow the name."""
        return self.size if self.kind in _WITH_SEGMENTS else 0

    @property
    def has_more(self) -> bool:
        """True if anything follows the header."""
        return bool(self.name_bytes or self.message_bytes or self.payload_bytes)

    @property
    def head_bytes(self) -> int:
        """The number of bytes between the header and the payload: name, segments and message."""
        of_segments = self.size * SEGMENT_BYTES if self.kind in _WITH_SEGMENTS else 0
        return self.name_bytes + of_segments + self.message_bytes


class Segment(NamedTuple):
    """The place of a part of a payload.

    Attributes:
        start: The offset of the part in the payload.
        num_bytes: The size of the part.
        region: The sender's number of the region that holds it; 0 if it follows the message.
        offset: Its offset in the region, or in the bytes that follow the message.
    """

    start: int
    num_bytes: int
    region: int
    offset: int


def aligned(offset: int) -> int:
    """Rounds an offset up to the next place where a tensor or a segment can begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack_segments(segments: Sequence[Segment]) -> bytes:
    """Returns the table of segments as it is sent."""
    return pack(f"<{4 * len(segments)}Q", *chain.from_iterable(segments))


def unpack_segments(data: memoryview, header: FrameHeader) -> list[Segment]:
    """Reads the segments of a payload; without any, the whole payload follows the message.

    Args:
        data: The bytes of the segments.
        header: The header of the frame.

    Raises:
        FrameError: Segments overlap, are out of order or misaligned, or one that follows the message exceeds the frame.
    """
    if not data:
        return [Segment(0, header.payload_bytes, 0, 0)] if header.payload_bytes else []
    segments = list(map(Segment._make, _SEGMENT.iter_unpack(data)))
    end = end_in_frame = 0
    for each in segments:
        if each.start % ALIGNMENT or each.offset % ALIGNMENT:
            raise FrameError(
                f"expected segments at multiples of {ALIGNMENT}, got one at {each.start} that begins at {each.offset}"
            )
        if each.start < end:
            raise FrameError(f"expected segments in order that do not overlap, got one at {each.start} before {end}")
        end = each.start + each.num_bytes
        if each.region:
            continue
        if each.offset < end_in_frame:
            raise FrameError(
                "expected segments that follow the message in order and without overlaps, got one at "
                f"{each.offset} before {end_in_frame}"
            )
        end_in_frame = each.offset + each.num_bytes
        if end_in_frame > header.payload_bytes:
            raise FrameError(
                f"expected a segment within the {header.payload_bytes} bytes of the frame, got one of "
                f"{each.num_bytes} at {each.offset}"
            )
    return segments


Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""The metadata of a call: over gRPC its own, on a socket behind the method's name. Keys are in lower case; values are
visible ASCII characters and spaces."""


def name_with(name: bytes, metadata: Metadata) -> bytes:
    """Returns the name of a CALL with the metadata appended, in order, as long as it fits."""
    for key, value in metadata:
        longer = b"%b\n%b:%b" % (name, key.encode(), value.encode())
        if len(longer) > MAX_NAME_BYTES:
            break
        name = longer
    return name


def split_name(name: bytes) -> tuple[bytes, dict[str, str]]:
    """Splits the name of a CALL into method and metadata; ignores lines that are not metadata."""
    method, *lines = name.split(b"\n")
    metadata = {}
    for line in lines:
        key, colon, value = line.partition(b":")
        if colon and value.isascii() and key.isascii():
            metadata[key.decode()] = value.decode()
    return method, metadata


BufferT = TypeVar("BufferT", bytes | memoryview, memoryview)

MAX_STRANDS = 15
"""The most strands: further sockets of a connection, over which large payloads are split."""
MIN_SPLIT_BYTES = 1 << 20
"""The smallest payload that is split."""


def shares(num_bytes: int, num_strands: int) -> list[int]:
    """Returns the sizes of a payload's parts: on the connection's own socket, then on each strand.

    The last parts may be empty. A payload that is too small to be split has one part.
    """
    if not num_strands or num_bytes < MIN_SPLIT_BYTES:
        return [num_bytes]
    share = aligned(-(-num_bytes // (num_strands + 1)))
    return [max(min(share, num_bytes - index * share), 0) for index in range(num_strands + 1)]


def split(buffers: Sequence[BufferT], num_strands: int) -> list[list[BufferT]]:
    """Splits a payload, given as consecutive buffers, into its parts."""
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
