"""The payloads of calls: bytes on the socket, or memory that the server shares with the client of a connection."""

import asyncio
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.frames import FrameError, FrameHeader, FrameKind, Segment, aligned, unpack_segments
from gradserve_protocol.memory.sealed import RegionError, map_region
from gradserve_server.devices.device import Array, SharedEvent, SharingError
from gradserve_server.devices.host.shared_blocks import SharedBlock, block_of
from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.rpc.listeners.sockets.context import FairSockets, SocketContext
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.security.identity import ANONYMOUS
from gradserve_server.tensors.payload import NO_PAYLOAD, Arrival, Payload, PayloadSegment, Place

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
        if not gone:
            return []
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


EARLY_BYTES = 4 << 20
"""The least size of a payload whose call may begin before all of it has arrived."""
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3
_NOTHING: NDArray[np.uint8] = np.empty(0, np.uint8)


def check_payload_bytes(num_bytes: int, allowed: int) -> None:
    """Raises FrameError if a payload is larger than the ticket of its connection allows."""
    if num_bytes > allowed:
        raise FrameError(f"expected a payload of at most {allowed} bytes, as the ticket says, got {num_bytes}")


class PayloadReceiver:
    """Receives the payloads of one connection, one at a time."""

    def __init__(self, stream: FrameStream, context: SocketContext, regions: ClientRegions) -> None:
        self._stream = stream
        self._context = context
        self._regions = regions
        self._unfilled = _NOTHING
        self._arrival: Arrival | None = None
        self._payload = NO_PAYLOAD
        self._is_copied = False
        """True if parts of the latest payload are copied from the client's memory."""
        self._filled: Callable[[], None] | None = None
        """Called when the latest payload has arrived."""
        self._is_free = asyncio.Event()
        self._is_free.set()

    @property
    def is_busy(self) -> bool:
        """True while somebody may read the latest payload."""
        return not self._is_free.is_set()

    @property
    def takes_time(self) -> bool:
        """True if the latest payload is so large that a call may begin before it has arrived."""
        return self._arrival is not None

    @property
    def is_lent(self) -> bool:
        """True while somebody may read parts of the latest payload in the client's memory."""
        return self.is_busy and self._payload.is_lent

    async def wait(self) -> None:
        """Waits until nobody reads the latest payload.

        A cancelled caller still waits until nobody reads the client's memory: that is the client's again once it has
        the answer, or the connection has ended.
        """
        cancelled: asyncio.CancelledError | None = None
        while self.is_busy:
            try:
                await self._is_free.wait()
            except asyncio.CancelledError as error:
                if not self.is_lent:
                    raise
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def open(
        self, header: FrameHeader, head: memoryview, allowed: int, *, in_place: bool, is_kept: bool
    ) -> Payload:
        """Makes room for the payload of a call, and returns it with its parts in regions. `fill` comes next.

        Args:
            header: The header of the call.
            head: The bytes between the header and the payload.
            allowed: The most bytes that the call may bring.
            in_place: Whether parts in the client's host memory may stay there; otherwise they are copied.
            is_kept: Whether it no longer counts as in flight once it has arrived: the call may wait for others with it.

        Raises:
            FrameError: The segments break the specification.
            MemoryError, ResourceExhaustedError: There is no memory; the payload has been received and dropped.
        """
        num_bytes = header.payload_bytes
        if not num_bytes and not header.num_segments:
            return NO_PAYLOAD
        places = unpack_segments(head[header.name_bytes : -header.message_bytes or None], header)
        check_payload_bytes(sum([each.num_bytes for each in places]), allowed)
        # Others go on while a payload that never fits is dropped.
        num_in_flight = num_bytes if num_bytes <= self._context.memory.limit else 0
        in_flight = self._context.in_flight
        memory = self._context.memory.reserve(purpose=Purpose.COMPUTING)
        if num_in_flight:
            await in_flight.enter(num_in_flight)
        turn = Place(in_flight, num_in_flight)
        try:
            own = self._allocate(num_bytes, memory)
            segments = [self._segment(place, own) for place in places]
            self._is_copied = not in_place and any(each.is_live and not each.on_gpu for each in segments)
            if self._is_copied:
                segments = await self._copied(segments, memory)
        except BaseException as error:
            memory.settle(0)
            turn.leave()
            if num_bytes and isinstance(error, ResourceExhaustedError | MemoryError):
                await self._stream.discard(num_bytes)
            raise

        is_free = self._is_free = asyncio.Event()

        def done() -> None:
            turn.leave()
            is_free.set()

        self._unfilled = own
        self._filled = turn.leave if is_kept else None
        self._arrival = Arrival(own) if num_bytes >= EARLY_BYTES else None
        self._payload = Payload(segments, memory, done, self._arrival, self._stream.has_left)
        return self._payload

    async def prepare_on_gpu(self, *, in_place: bool) -> None:
        """Waits for the client's GPU work that the payload depends on.

        Args:
            in_place: Whether parts on the GPU may stay there; otherwise they are copied to the host.

        Raises:
            AbortedError: The client left before everything was copied.
            InvalidArgumentError: The client's event cannot be queried.
            MemoryError, ResourceExhaustedError: There is no memory for copies.
        """
        payload, event, sharing = self._payload, self._regions.event, self._context.gpu.sharing
        segments = payload.on_gpu
        if not segments:  # the call does not use its payload
            return
        assert event is not None, "it came with the first region of the GPU"
        assert sharing is not None, "regions of the GPU have been opened"
        await _until_done(event)
        if in_place:
            return
        assert payload.memory is not None, "the payload of a call has a reservation"
        payload.memory.grow(sum(each.memory.nbytes for each in segments))
        device = sharing.device

        def copy_all() -> dict[int, PayloadSegment]:
            with device.computing():
                return {each.start: PayloadSegment(each.start, device.to_host(each.memory)) for each in segments}

        copies = await self._context.compute.run_in_thread(copy_all)
        payload.check_lender()
        payload.replace(copies)

    async def fill(self) -> None:
        """Receives the payload of the latest call.

        Raises:
            AbortedError: The client left before its memory was copied. If it gave up the call while the server was
                suspended, the call must not run with whatever the memory holds now.
            EOFError, SilentError, TooSlowError, OSError: The payload did not come.
        """
        own, self._unfilled = self._unfilled, _NOTHING
        if own.size:
            reading = self._stream.read_into(own, None if self._arrival is None else self._arrival.advance)
            await self._context.in_flight.senders.receive(reading, self._stream.num_arrived)
            if self._filled is not None:
                self._filled()
        if self._is_copied and self._stream.has_left():
            raise AbortedError("the caller left before its memory had been copied", caller_left=True)

    def _segment(self, place: Segment, own: NDArray[np.uint8]) -> PayloadSegment:
        if place.region:
            part = self._regions.part(place.region, place.offset, place.num_bytes)
            return PayloadSegment(place.start, part.memory, is_live=True, on_gpu=part.on_gpu)
        return PayloadSegment(place.start, own[place.offset : place.offset + place.num_bytes])

    def _allocate(self, num_bytes: int, memory: Reservation) -> NDArray[np.uint8]:
        if not num_bytes:
            return _NOTHING
        memory.grow(num_bytes)
        return self._context.allocate((num_bytes,), np.dtype(np.uint8))

    async def _copied(self, segments: Sequence[PayloadSegment], memory: Reservation) -> list[PayloadSegment]:
        """Replaces segments in the client's host memory by copies."""
        live = sum(each.memory.size for each in segments if each.is_live and not each.on_gpu)
        memory.grow(live)

        def copy(segment: PayloadSegment) -> PayloadSegment:
            if not segment.is_live or segment.on_gpu:
                return segment
            own = self._context.allocate((segment.memory.size,), np.dtype(np.uint8))
            np.copyto(own, segment.memory)
            return PayloadSegment(segment.start, own)

        return await self._context.compute.run(live, lambda: [copy(each) for each in segments])


async def _until_done(event: SharedEvent) -> None:
    """Waits for an event of a client's GPU work, by polling: a client whose work never ends must not block a thread."""
    pause = _FIRST_PAUSE_SECONDS
    try:
        while not event.is_done():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    except SharingError as error:
        raise InvalidArgumentError(str(error)) from None
