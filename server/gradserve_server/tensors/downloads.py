"""Streams tensors out of the memory of their device."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Array, Device
from gradserve_server.resources.quotas import Quota
from gradserve_server.tensors.spans import SLOT_BYTES, Span, aligned, spans

_NUM_SLOTS = 2
_BYTE = np.dtype(np.uint8)


class Downloads:
    """Copies tensors to slots of host memory, one ahead of the slot that is being sent.

    So the first bytes leave at once, however large the tensors are, and none of them is ever whole on the host.
    """

    def __init__(
        self,
        host: Device,
        device: Device,
        compute: Compute,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]],
        memory: Quota,
    ) -> None:
        """Takes the devices, and what the slots need.

        Args:
            host: The host as a device.
            device: The device of the ops.
            compute: Runs the copies.
            allocate: Allocates the slots.
            memory: The quota of bytes that they count in.
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
        with self._memory.hold(_NUM_SLOTS * slot_bytes):
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
