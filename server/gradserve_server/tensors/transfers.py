"""Moves tensors to and from the memory of their device while they travel, in spans of one size."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.arrays import Assembly, check_complete, check_not_longer
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.devices.device import Array, Device, bytes_of, with_all_memory
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.resources.memory import Memory, Room
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.eviction import Evictor
from gradserve_server.tensors.spec import num_bytes_of
from gradserve_server.tensors.store import Upload

SLOT_BYTES = 4 << 20
"""Bytes copied to or from a GPU at a time. The bus takes a tenth of a millisecond, as long as a thread to wake up."""
_NUM_SLOTS = 2
_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an array.

    Attributes:
        array: The array.
        offset: Where the part begins there, in bytes.
        num_bytes: Its size.
        place: Where it is in its span.
    """

    array: Array
    offset: int
    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Span:
    """Parts of arrays that are copied together.

    Attributes:
        parts: The parts, in ascending order.
        num_bytes: The size of the span, including gaps between and after the parts.
    """

    parts: Sequence[Part]
    num_bytes: int


def spans(arrays: Iterable[Array], slot_bytes: int, alignment: int = 1) -> Iterator[Span]:
    """Cuts the bytes of arrays into spans of `slot_bytes`, the last one shorter.

    Args:
        arrays: The arrays.
        slot_bytes: The size of a span, a multiple of the alignment.
        alignment: Each array begins at a multiple of this.
    """
    parts: list[Part] = []
    place = 0
    for array in arrays:
        offset = 0
        while offset < array.nbytes:
            if not offset:
                place = aligned(place, alignment)
            if place == slot_bytes:
                yield Span(parts, place)
                parts, place = [], 0
            size = min(array.nbytes - offset, slot_bytes - place)
            parts.append(Part(array, offset, size, place))
            offset, place = offset + size, place + size
    if parts:
        yield Span(parts, place)


def aligned(place: int, alignment: int) -> int:
    """Rounds a place up to a multiple of an alignment."""
    return -(-place // alignment) * alignment


Arrived: TypeAlias = "Callable[[NDArray[Any]], Awaitable[None]]"


class Landing(Protocol):
    """Fills arrays with a payload that arrives in chunks.

    Attributes:
        received_bytes: How much has arrived.
    """

    @property
    def received_bytes(self) -> int: ...

    async def write(self, chunk: memoryview, /) -> None:
        """Adds the next bytes.

        Raises:
            PayloadError: The payload is longer than the arrays.
        """
        ...

    async def finish(self) -> None:
        """Returns when the arrays are filled.

        Raises:
            PayloadError: The payload is shorter than the arrays.
        """
        ...


class HostLanding:
    """Fills arrays in host memory."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._assembly = Assembly(arrays)

    @property
    def received_bytes(self) -> int:
        """The number of bytes that have arrived."""
        return self._assembly.received_bytes

    async def write(self, chunk: memoryview) -> None:
        """Adds the next bytes; see `Landing`."""
        self._assembly.write(chunk)

    async def finish(self) -> None:
        """Checks that everything has arrived; see `Landing`."""
        self._assembly.finish()


class DeviceLanding:
    """Fills arrays in the memory of a device, through slots: one is copied while the next is filled.

    So the arrays are filled soon after the last byte has arrived, and the host never holds all of them.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        num_bytes: int,
        device: Device,
        compute: Compute,
        slots: Sequence[NDArray[np.uint8]],
    ) -> None:
        self._expected_bytes = num_bytes
        self.received_bytes = 0
        self._device = device
        self._compute = compute
        self._slots = slots
        self._turn = 0
        self._filled = 0
        self._cut = spans(arrays, slots[0].size)
        self._copying: asyncio.Task[None] | None = None

    async def write(self, chunk: memoryview) -> None:
        """Adds the next bytes; see `Landing`."""
        self.received_bytes += len(chunk)
        check_not_longer(self._expected_bytes, self.received_bytes)
        while chunk:
            slot = self._slots[self._turn]
            count = min(len(chunk), slot.size - self._filled)
            slot[self._filled : self._filled + count] = chunk[:count]
            chunk = chunk[count:]
            self._filled += count
            if self._filled == slot.size:
                await self._copy()

    async def finish(self) -> None:
        """Returns when the arrays are filled; see `Landing`."""
        check_complete(self._expected_bytes, self.received_bytes)
        if self._filled:
            await self._copy()
        if self._copying is not None:
            await self._copying

    async def close(self) -> None:
        """Waits for the last copy to end."""
        if self._copying is not None:
            await asyncio.wait([self._copying])

    async def _copy(self) -> None:
        """Begins to copy the slot, after the copy of the previous one."""
        if self._copying is not None:
            await self._copying
        slot, self._filled = self._slots[self._turn], 0
        self._turn = (self._turn + 1) % len(self._slots)
        self._copying = asyncio.ensure_future(self._compute.run_in_thread(self._empty, self._cut, slot))

    def _empty(self, cut: Iterator[Span], slot: NDArray[np.uint8]) -> None:
        with self._device.computing():
            for part in next(cut).parts:
                self._device.write(part.array, part.offset, slot[part.place : part.place + part.num_bytes])


class Uploads:
    """Receives tensors into memory of the host or of the ops' device."""

    def __init__(
        self,
        host: Device,
        device: Device,
        compute: Compute,
        device_compute: Compute,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]],
        memory: Memory,
        evictor: Evictor | None = None,
    ) -> None:
        """Takes the devices, and what the slots need.

        Args:
            host: The host as a device.
            device: The device of the ops, which may be the host.
            compute: Runs work that is slow for many tensors.
            device_compute: Runs the copies.
            allocate: Allocates the slots.
            memory: The memory of the server, that of the host for the slots.
            evictor: Makes room in device memory; None if ops run on the host.
        """
        self.host = host
        self._device = device
        self._evictor = evictor
        self._compute = compute
        self._device_compute = device_compute
        self._allocate = allocate
        self._memory = memory

    def device(self, name: str, field: str) -> Device:
        """Returns the device that a request names.

        Raises:
            InvalidArgumentError: Tensors cannot be put on it.
        """
        if name == "auto":
            return self._device
        for device in (self.host, self._device):
            if name in (device.name, ""):
                return device
        known = ", ".join(dict.fromkeys((self.host.name, self._device.name)))
        raise InvalidArgumentError(f"expected {known} or auto, got {quoted(name)}", field=field)

    @asynccontextmanager
    async def room(self, device: Device, num_bytes: int, owner: Identity) -> AsyncIterator[Room | None]:
        """Reserves memory of a device for an upload during a block; yields None for the host.

        Raises:
            ResourceExhaustedError: There is not enough, even after evicting everything that can be.
        """
        if device is self.host or self._evictor is None:
            yield None
            return
        with self._memory.room_of_call(owner) as room:
            await self._evictor.grow(room.device, num_bytes, owner)
            yield room

    @asynccontextmanager
    async def land(self, upload: Upload, device: Device) -> AsyncIterator[Landing]:
        """Allocates the arrays of an upload on a device; returns what fills them in the block.

        Raises:
            ResourceExhaustedError: There is no room for the slots.
            MemoryError: There is not enough memory.
        """
        if device is self.host:
            yield await self._compute.run(PIECE_BYTES * len(upload.specs), lambda: HostLanding(upload.arrays))
            return
        num_bytes = await self._num_bytes_of(upload)
        arrays = await self._make_room(upload, num_bytes)
        slot_bytes = max(min(SLOT_BYTES, num_bytes), 1)
        with self._memory.host.reserve(_NUM_SLOTS * slot_bytes, purpose=Purpose.COMPUTING):
            slots = [self._allocate((slot_bytes,), _BYTE) for _ in range(_NUM_SLOTS)]
            landing = DeviceLanding(arrays, num_bytes, device, self._device_compute, slots)
            try:
                yield landing
            finally:
                await landing.close()

    async def bring(self, upload: Upload, sources: Sequence[NDArray[Any]], arrived: Arrived) -> None:
        """Fills the arrays of an upload on the device of the ops from arrays that may still be arriving.

        Args:
            upload: The upload.
            sources: The arrays.
            arrived: Waits until some bytes of them are there.

        Raises:
            MemoryError: There is not enough memory.
        """
        arrays = await self._make_room(upload, await self._num_bytes_of(upload))
        targets = dict(zip(map(id, sources), arrays, strict=True))
        cut = spans(sources, SLOT_BYTES)
        while (span := await self._compute.run_in_thread(next, cut, None)) is not None:
            for part in span.parts:
                await arrived(_bytes_in(part))
            await self._device_compute.run_in_thread(self._copy, span, targets)

    async def _num_bytes_of(self, upload: Upload) -> int:
        return await self._compute.run(PIECE_BYTES * len(upload.specs), num_bytes_of, upload.specs)

    async def _make_room(self, upload: Upload, num_bytes: int) -> Sequence[Array]:
        def work() -> Awaitable[Sequence[Array]]:
            return self._device_compute.run_in_thread(with_all_memory, self._device, self._allocated, upload)

        if self._evictor is None:
            return await work()
        return await self._evictor.attempt(work, num_bytes, upload.owner)

    def _allocated(self, upload: Upload) -> Sequence[Array]:
        # Other threads will write to the memory: nothing that this one did with it before may be under way.
        with self._device.computing():
            return upload.arrays

    def _copy(self, span: Span, targets: Mapping[int, Array]) -> None:
        with self._device.computing():
            for part in span.parts:
                self._device.write(targets[id(part.array)], part.offset, _bytes_in(part))


def _bytes_in(part: Part) -> NDArray[np.uint8]:
    return bytes_of(part.array)[part.offset : part.offset + part.num_bytes]


class Downloads:
    """Copies tensors to slots of host memory, one ahead of the slot that is being sent.

    So the first bytes leave at once, and the host never holds a whole tensor, whatever its size.
    """

    def __init__(
        self,
        host: Device,
        device: Device,
        compute: Compute,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]],
        memory: Budget,
    ) -> None:
        """Takes the devices, and what the slots need.

        Args:
            host: The host as a device.
            device: The device of the ops.
            compute: Runs the copies.
            allocate: Allocates the slots.
            memory: The budget of bytes for the slots.
        """
        self._host = host
        self._device = device
        self._compute = compute
        self._allocate = allocate
        self._memory = memory

    async def pieces(self, arrays: Sequence[Array], *, alignment: int = 1) -> AsyncGenerator[memoryview, None]:
        """Yields the bytes of arrays, one array after the other. A piece is valid until the next is asked for.

        Args:
            arrays: The arrays, on the host or on the device.
            alignment: A power of two, of which the place of each array is a multiple; there are zeros between them.

        Raises:
            ResourceExhaustedError: There is no room for the slots.
            MemoryError: Likewise.
        """
        num_bytes = sum([aligned(array.nbytes, alignment) for array in arrays])
        slot_bytes = min(SLOT_BYTES, num_bytes)
        with self._memory.reserve(_NUM_SLOTS * slot_bytes, purpose=Purpose.COMPUTING):
            slots = [self._allocate((slot_bytes,), _BYTE) for _ in range(_NUM_SLOTS)]
            cut = spans(arrays, slot_bytes, alignment)
            ahead = self._begin(cut, slots[0])
            try:
                turn = 0
                while size := await ahead:
                    turn += 1
                    ahead = self._begin(cut, slots[turn % _NUM_SLOTS])
                    yield slots[(turn - 1) % _NUM_SLOTS].data[:size]
            finally:
                ahead.cancel()
                await asyncio.wait([ahead])

    def _begin(self, cut: Iterator[Span], slot: NDArray[np.uint8]) -> asyncio.Task[int]:
        """Begins to fill a slot with the next span; returns a task that returns its size, 0 after the last one."""
        return asyncio.ensure_future(self._compute.run_in_thread(self._fill, cut, slot))

    def _fill(self, cut: Iterator[Span], slot: NDArray[np.uint8]) -> int:
        span = next(cut, None)
        if span is None:
            return 0
        # What lies between parts may be left of other tensors: it is zeroed.
        end = 0
        with self._device.computing():
            for part in span.parts:
                slot[end : part.place] = 0
                end = part.place + part.num_bytes
                device = self._host if self._host.holds(part.array) else self._device
                device.read(part.array, part.offset, slot[part.place : end])
            slot[end : span.num_bytes] = 0
        return span.num_bytes
