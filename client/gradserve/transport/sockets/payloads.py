"""Payloads of frames: where the elements of tensors are, in what is sent and in what is received."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from gradserve.calls.exchange import Progress
from gradserve.transport.sockets.gpu_regions import GpuRegion
from gradserve_protocol.arrays import Array, DType, buffer_of
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.frames import ALIGNMENT, FrameError, FrameHeader, Segment
from gradserve_protocol.memory.pool import BufferPool, Region
from gradserve_protocol.tensors import Contents, to_dtype
from gradserve_protocol.v1 import socket_messages_pb2, tensor_pb2

_MAX_GAP_BYTES = 1 << 16


@dataclass(frozen=True)
class Incoming:
    """The tensors of a reply.

    Attributes:
        by_offset: Their arrays, by `payload_offset`.
        buffers: What to receive the bytes after the message into: the memory of arrays, and of gaps between them.
    """

    by_offset: Mapping[int, Array]
    buffers: Sequence[memoryview]


@dataclass(frozen=True)
class Outgoing:
    """The payload of a call as it is sent.

    Attributes:
        prefix: Frames to send before the call.
        segments: Its segments; none if all of it follows the message.
        following: What follows the message.
        new_regions: Regions to hand over before the call.
        is_possible: False if the server would have to write to memory that it cannot have, so that the call cannot be
            sent; then there is nothing but the prefix.
    """

    prefix: bytes = b""
    segments: Sequence[Segment] = ()
    following: Sequence[bytes | memoryview] = ()
    new_regions: Sequence[Region | GpuRegion] = ()
    is_possible: bool = True


NOTHING = Outgoing()
"""An empty payload, for calls without one."""


class Placed(NamedTuple):
    """A tensor of a reply, and the place of its elements.

    Attributes:
        offset: Its `payload_offset`.
        dtype: Its dtype.
        shape: Its shape.
        num_bytes: The size of its elements.
        region: The server's region that they are in; 0 for those that follow the message.
        place: Where they begin in the region, or among the bytes that follow the message.
    """

    offset: int
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int
    region: int
    place: int


class Payloads:
    """Puts tensors into the frames of one connection, and takes them out.

    Here payloads follow the message in both directions, and received arrays come from a pool. `RegionPayloads` also
    uses shared memory.

    Attributes:
        has_regions: Whether frames of the server may bring descriptors.
    """

    has_regions = False

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    @property
    def lends_memory(self) -> bool:
        """True while the server may read tensors of a call in the client's memory."""
        return False

    @property
    def reads_in_place(self) -> bool:
        """True while arrays of replies lie in the server's memory, which counts until the connection ends."""
        return False

    def welcomed(self, welcome: socket_messages_pb2.Welcome, /) -> None:
        """Notes what the server grants to the connection."""

    def outgoing(self, contents: Contents | None, progress: Progress | None = None, /) -> Outgoing:
        """Returns what to send for the payload of a call, None for no payload; tells `progress` of bytes copied."""
        if contents is None or not contents.num_bytes:
            return NOTHING
        return Outgoing(is_possible=False) if contents.is_written else Outgoing(following=contents.pieces())

    def handing_over(self, region: Region | GpuRegion, /) -> tuple[bytes, int | None]:
        """Returns the frame that hands over a region, and a descriptor to send with it; `handed_over` follows."""
        raise AssertionError("payloads that follow the message are in no region")

    def handed_over(self, region: Region | GpuRegion, refusal: GradserveError | None, /) -> None:
        """Notes the server's answer to a region that was handed over: None if it accepts the region."""

    def returned(self) -> None:
        """Notes that the server has answered a call: it no longer reads the memory lent for it."""

    def withdraw(self) -> None:
        """Takes back the memory lent for a call without an answer, which the server may still be reading."""

    def incoming(
        self,
        tensors: Sequence[tensor_pb2.Tensor],
        segments: Sequence[Segment],
        num_following: int,
        progress: Progress | None = None,
        /,
        *,
        in_place: bool,
    ) -> Incoming:
        """Returns the arrays of a reply.

        Args:
            tensors: The tensors beside the message.
            segments: The segments of the payload.
            num_following: The number of bytes that follow the message.
            progress: Told of bytes copied for this.
            in_place: Whether arrays may lie in memory of the server.

        Raises:
            FrameError: The tensors or the segments violate the specification.
        """
        by_offset: dict[int, Array] = {}
        buffers: list[memoryview] = []
        gap = memoryview(bytearray(_MAX_GAP_BYTES if num_following else 0))
        end = 0
        places = sorted(_placed(tensors, segments), key=attrgetter("place"))
        in_regions = [each for each in places if each.region]
        if in_regions:
            arrays = self._in_regions(in_regions, progress)
            by_offset |= zip([each.offset for each in in_regions], arrays, strict=True)
        for placed in places:
            if placed.region:
                continue
            array = self._pool.empty(placed.shape, placed.dtype)
            if placed.place != end:
                buffers.append(_gap(gap, placed.place - end))
            buffers.append(buffer_of(array))
            by_offset[placed.offset] = array
            end = placed.place + placed.num_bytes
        if num_following != end:
            buffers.append(_gap(gap, num_following - end))
        return Incoming(by_offset, buffers)

    def notice(self, header: FrameHeader, descriptors: Sequence[int], /) -> None:
        """Takes a frame that came instead of a reply, with its descriptors, which it closes.

        Raises:
            FrameError: The frame is not allowed.
        """
        raise FrameError(f"expected a REPLY, got {header}")

    def farewells(self) -> Sequence[bytes]:
        """Returns the frames to send after a reply."""
        return ()

    def _in_regions(self, places: Sequence[Placed], progress: Progress | None) -> Sequence[Array]:
        """Returns tensors whose elements are in regions of the server."""
        raise FrameError(f"expected the payload after the message, got {places[0]}")


def _placed(tensors: Sequence[tensor_pb2.Tensor], segments: Sequence[Segment]) -> list[Placed]:
    """Returns the places of tensors."""
    remaining = iter(segments)
    segment = Segment(0, 0, 0, 0)
    places = []
    end = 0
    for tensor in sorted(tensors, key=attrgetter("payload_offset")):
        start, num_bytes = tensor.payload_offset, num_bytes_of(tensor)
        while segment.start + segment.num_bytes < start + num_bytes:
            following = next(remaining, None)
            if following is None:
                raise FrameError(f"expected the bytes {start} to {start + num_bytes} of the payload within a segment")
            segment = following
        if start < segment.start:
            raise FrameError(f"expected the bytes {start} to {start + num_bytes} within a segment, got {segment}")
        if start % ALIGNMENT or start < end:
            raise FrameError(f"expected a multiple of {ALIGNMENT}, not before {end}, as an offset, got {start}")
        end = start + num_bytes
        place = segment.offset + start - segment.start
        places.append(Placed(start, to_dtype(tensor.dtype), tuple(tensor.shape), num_bytes, segment.region, place))
    return places


def num_bytes_of(tensor: tensor_pb2.Tensor) -> int:
    """Returns the size of a tensor's elements.

    Raises:
        FrameError: The tensor is not possible.
    """
    if min(tensor.shape, default=0) < 0:
        raise FrameError(f"expected sizes of at least 0, got {list(tensor.shape)}")
    try:
        return math.prod(tensor.shape) * to_dtype(tensor.dtype).itemsize
    except ValueError as error:
        raise FrameError(str(error)) from None


def _gap(memory: memoryview, num_bytes: int) -> memoryview:
    if not 0 < num_bytes <= len(memory):
        raise FrameError(f"expected tensors without overlaps and gaps of at most {len(memory)} bytes, got {num_bytes}")
    return memory[:num_bytes]
