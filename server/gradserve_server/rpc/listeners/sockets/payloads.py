"""The payloads of calls: room for them, their arrival, and copies out of memory that clients can change."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.frames import FrameError, FrameHeader, Segment, unpack_segments
from gradserve_server.devices.device import SharedEvent, SharingError
from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.rpc.listeners.sockets.context import SocketContext
from gradserve_server.rpc.listeners.sockets.regions import ClientRegions
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.tensors.payload import NO_PAYLOAD, Arrival, Payload, PayloadSegment

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

    async def open(self, header: FrameHeader, head: memoryview, allowed: int, *, in_place: bool) -> Payload:
        """Makes room for the payload of a call, and returns it with its parts in regions. `fill` comes next.

        Args:
            header: The header of the call.
            head: The bytes between the header and the payload.
            allowed: The most bytes that the call may bring.
            in_place: Whether parts in the client's host memory may stay there; otherwise they are copied.

        Raises:
            FrameError: The segments break the specification.
            MemoryError, ResourceExhaustedError: There is no memory; the payload has been received and dropped.
        """
        num_bytes = header.payload_bytes
        if not num_bytes and not header.num_segments:
            return NO_PAYLOAD
        places = unpack_segments(head[header.name_bytes : -header.message_bytes or None], header)
        check_payload_bytes(sum([each.num_bytes for each in places]), allowed)
        waits = num_bytes <= self._context.memory.limit  # others go on while a payload that never fits is dropped
        in_flight = self._context.in_flight
        memory = self._context.memory.reserve(purpose=Purpose.COMPUTING)
        if waits and num_bytes:
            await in_flight.enter(num_bytes)

        def leave() -> None:
            if waits and num_bytes:
                in_flight.leave(num_bytes)

        try:
            own = self._allocate(num_bytes, memory)
            segments = [self._segment(place, own) for place in places]
            self._is_copied = not in_place and any(each.is_live and not each.on_gpu for each in segments)
            if self._is_copied:
                segments = await self._copied(segments, memory)
        except BaseException as error:
            memory.settle(0)
            leave()
            if num_bytes and isinstance(error, ResourceExhaustedError | MemoryError):
                await self._stream.discard(num_bytes)
            raise

        is_free = self._is_free = asyncio.Event()

        def done() -> None:
            leave()
            is_free.set()

        self._unfilled = own
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
