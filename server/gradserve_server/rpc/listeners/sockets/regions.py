"""Memory shared with the client of a connection: the regions it has handed over, and the server's that it reads."""

import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from gradserve_protocol.frames import FrameError, FrameHeader, FrameKind, Segment, aligned
from gradserve_protocol.memory.sealed import RegionError, map_region
from gradserve_server.devices.device import Array, SharedEvent
from gradserve_server.devices.host.shared_blocks import SharedBlock, block_of
from gradserve_server.rpc.listeners.sockets.context import FairSockets
from gradserve_server.security.identity import ANONYMOUS

_MAX_MAPS = 16384
"""A quarter of the 65530 maps that Linux allows a process."""


def max_regions() -> int:
    """Returns the most regions of clients that a server maps: each takes a map and, in Python, a descriptor."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_MAPS if descriptors == resource.RLIM_INFINITY else min(descriptors // 2, _MAX_MAPS)


@dataclass(frozen=True, eq=False)
class RegionPart:
    """A part of a region, or all of it.

    Attributes:
        memory: The bytes, one-dimensional, of dtype uint8; read-only in host memory.
        on_gpu: Whether they are in GPU memory.
    """

    memory: Array
    on_gpu: bool


class ClientRegions:
    """The regions that the client has handed over: in host memory, mapped read-only, or on the GPU.

    They end with the connection. They count with their declared sizes, because reading an empty memory file allocates
    memory that its owner would not pay for.
    """

    def __init__(self, sockets: FairSockets) -> None:
        self.owner = ANONYMOUS
        """The owner of the regions, known once the connection is open."""
        self._sockets = sockets
        self._regions: dict[int, RegionPart] = {}
        self._counts: dict[int, ExitStack] = {}
        self.event: SharedEvent | None = None
        """Completes with the GPU work that the client's latest call depends on; comes with the first region."""

    def add(self, number: int, num_bytes: int, descriptor: int) -> None:
        """Maps a region.

        Raises:
            FrameError: The region cannot be mapped safely, or the number is taken or 0.
            ResourceExhaustedError: See `FairSockets.region`.
        """
        with self._counted(number, num_bytes, on_gpu=False):
            try:
                memory = np.frombuffer(map_region(descriptor, num_bytes), np.uint8)
            except RegionError as error:
                raise FrameError(str(error)) from None
            self._regions[number] = RegionPart(memory, on_gpu=False)

    async def add_on_gpu(self, number: int, num_bytes: int, open_memory: Callable[[], Awaitable[Array]]) -> None:
        """Adds a region in GPU memory, which a function opens.

        Raises:
            FrameError: The number is taken or 0.
            ResourceExhaustedError: See `FairSockets.region`.
            SharingError: The memory cannot be opened.
        """
        with self._counted(number, num_bytes, on_gpu=True):
            self._regions[number] = RegionPart(await open_memory(), on_gpu=True)

    def drop(self, number: int) -> None:
        """Forgets a region.

        Raises:
            FrameError: There is no region with this number.
        """
        if self._regions.pop(number, None) is None:
            raise FrameError(f"expected the number of a region, got {number}")
        self._counts.pop(number).close()

    def part(self, number: int, offset: int, num_bytes: int) -> RegionPart:
        """Returns a part of a region.

        Raises:
            FrameError: There is no such part.
        """
        region = self._regions.get(number)
        if region is None:
            raise FrameError(f"expected the number of a region, got {number}")
        size = region.memory.nbytes
        if offset + num_bytes > size:
            raise FrameError(
                f"expected a segment within the {size} bytes of region {number}, got one of {num_bytes} at {offset}"
            )
        return RegionPart(region.memory[offset : offset + num_bytes], region.on_gpu)

    def close(self) -> None:
        """Forgets all regions."""
        for number in list(self._regions):
            self.drop(number)
        self.event = None

    @contextmanager
    def _counted(self, number: int, num_bytes: int, *, on_gpu: bool) -> Iterator[None]:
        if number == 0 or number in self._regions:
            raise FrameError(f"expected a new number other than 0 for a region, got {number}")
        with ExitStack() as count:
            count.enter_context(self._sockets.region(self.owner, num_bytes, on_gpu=on_gpu))
            yield
            self._counts[number] = count.pop_all()


@dataclass(frozen=True, slots=True)
class PlacedPayload:
    """A payload as a client on the same machine gets it.

    Attributes:
        segments: The places of its parts.
        pieces: The bytes that follow the message.
        new: The blocks that the client has not mapped yet.
    """

    segments: list[Segment]
    pieces: list[memoryview | bytes]
    new: list[SharedBlock]


class ServerRegions:
    """The server's regions that the client has mapped, and its reads of them."""

    def __init__(self) -> None:
        self._known: dict[int, SharedBlock] = {}
        self._reads: Counter[int] = Counter()
        self._holds: dict[int, object] = {}
        self._dropped: list[SharedBlock] = []
        """The blocks of the latest DROP frames; kept because the client may still have them mapped."""

    def place(self, buffers: Mapping[int, memoryview]) -> PlacedPayload:
        """Returns the payload of a reply, and begins a read of each block that holds some of its tensors.

        Args:
            buffers: The payload of the reply, by offset.
        """
        segments: list[Segment] = []
        pieces: list[memoryview | bytes] = []
        new: list[SharedBlock] = []
        read: dict[int, object] = {}
        end = 0
        for start, buffer in buffers.items():
            found = block_of(buffer)
            if found is None:
                place = aligned(end)
                if place > end:
                    pieces.append(bytes(place - end))
                segments.append(Segment(start, len(buffer), 0, place))
                pieces.append(buffer)
                end = place + len(buffer)
                continue
            block = found.block
            read[block.number] = found.hold
            segments.append(Segment(start, len(buffer), block.number, found.offset))
            if block.number not in self._known:
                self._known[block.number] = block
                new.append(block)
        for number, hold in read.items():
            self._reads[number] += 1
            self._holds[number] = hold
        return PlacedPayload(segments, pieces, new)

    def release(self, header: FrameHeader) -> None:
        """Ends reads of a block.

        Raises:
            FrameError: The client has fewer reads of the block.
        """
        number, count = header.number, header.size
        if not 0 < count <= self._reads[number]:
            raise FrameError(f"expected 1 to {self._reads[number]} reads of region {number} to end, got {count}")
        self._reads[number] -= count
        if not self._reads[number]:
            del self._reads[number]
            del self._holds[number]

    def forget_unused(self) -> list[bytes]:
        """Forgets blocks that will not be used again; returns the DROP frames that tell the client to unmap them."""
        gone = [number for number, block in self._known.items() if block.is_retired and not self._reads[number]]
        self._dropped += [self._known.pop(number) for number in gone]
        return [FrameHeader(FrameKind.DROP, number=number).pack() for number in gone]

    def begin_call(self) -> None:
        """Notes a new call: the client has read everything that was sent before the last reply."""
        self._dropped.clear()

    def close(self) -> None:
        """Ends the reads of the connection. Blocks that the client may still be reading are never written again."""
        for number in self._reads:
            self._known[number].is_spoilt = True
        self._reads.clear()
        self._holds.clear()
        self._known.clear()
        self._dropped.clear()
