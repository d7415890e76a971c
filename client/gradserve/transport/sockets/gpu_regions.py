"""The memory of a GPU that a client hands over on one connection."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from gradserve_protocol.frames import ALIGNMENT, FrameHeader, FrameKind
from gradserve_protocol.gpu import Allocation, Gpu, GpuArray, GpuError
from gradserve_protocol.v1 import socket_messages_pb2

_FIRST_NUMBER = 1 << 48
"""Beyond the numbers of regions in host memory."""
_MAX_REGIONS = 32
"""Libraries allocate memory in few large pieces; the one that has not been used for longest makes way for another."""
_NOT_SHAREABLE = (
    "CUDA shares only what cudaMalloc has allocated, not memory of cudaMallocAsync or of expandable segments: "
    "PYTORCH_CUDA_ALLOC_CONF, cupy.cuda.MemoryAsyncPool and XLA_PYTHON_CLIENT_ALLOCATOR choose"
)

_ANOTHER = "the server does not compute on this GPU"


@dataclass(frozen=True, eq=False)
class GpuRegion:
    """An allocation, as it is handed over.

    Attributes:
        number: A number that no other region of the connection has.
        allocation: The allocation.
        handle: Its handle.
    """

    number: int
    allocation: Allocation
    handle: bytes


class GpuPlace(NamedTuple):
    """A place in a region."""

    region: GpuRegion
    offset: int


class NotSharedError(Exception):
    """An array cannot be handed over; the message says why."""


class GpuRegions:
    """The allocations that the server has open for a connection, and those to hand over next.

    An allocation is known by its address and its buffer id: a library that frees memory and allocates it again gets
    another id. What is gone is dropped before the next call.

    Attributes:
        opened: The regions that the server has open, by address and buffer id, the latest last.
    """

    def __init__(self, uuid: bytes, why_not: str) -> None:
        """Takes which GPU's memory the server opens, or why none."""
        self._uuid = uuid
        self._why_not = why_not
        self._numbers = count(_FIRST_NUMBER)
        self._gpu: Gpu | None = None
        self._event = 0
        self._has_event = False
        """True once the server has the event, which comes with the first region that it accepts."""
        self.opened: OrderedDict[tuple[int, int], GpuRegion] = OrderedDict()
        self._waiting: dict[tuple[int, int], GpuRegion] = {}
        """Regions that are not handed over yet, or were and are not answered."""
        self._refused: dict[tuple[int, int], str] = {}

    def place_of(self, array: GpuArray) -> GpuPlace:
        """Returns where an array is, in a region that may have to be handed over first.

        Raises:
            NotSharedError: It cannot be shared with the server.
        """
        if array.gpu.uuid != self._uuid:
            raise NotSharedError(self._why_not or _ANOTHER)
        try:
            allocation = array.gpu.allocation_of(array.address)
            key = allocation.base, allocation.buffer_id
            if (reason := self._refused.get(key)) is not None:
                raise NotSharedError(reason)
            if not allocation.can_be_shared:
                raise NotSharedError(_NOT_SHAREABLE)
            region = self.opened.get(key) or self._waiting.get(key)
            if region is None:
                self._waiting[key] = region = self._made(array.gpu, allocation)
        except GpuError as error:
            raise NotSharedError(str(error)) from None
        offset = array.address - allocation.base
        if offset % ALIGNMENT:
            raise NotSharedError(f"it does not begin at a multiple of {ALIGNMENT} bytes in its allocation")
        if key in self.opened:
            self.opened.move_to_end(key)
        return GpuPlace(region, offset)

    def is_open(self, region: GpuRegion) -> bool:
        """Returns True if the server has a region."""
        return (region.allocation.base, region.allocation.buffer_id) in self.opened

    def frame_of(self, region: GpuRegion) -> bytes:
        """Returns the frame that hands over a region; `handed_over` follows.

        Raises:
            GpuError: CUDA fails.
        """
        assert self._gpu is not None, "a region was made"
        event = b"" if self._has_event else self._gpu.event_handle(self._event)
        message = socket_messages_pb2.GpuRegion(
            handle=region.handle, buffer_id=region.allocation.buffer_id, event=event
        ).SerializeToString()
        size = region.allocation.num_bytes
        return (
            FrameHeader(FrameKind.GPU_REGION, message_bytes=len(message), number=region.number, size=size).pack()
            + message
        )

    def handed_over(self, region: GpuRegion, refusal: str | None) -> None:
        """Notes the server's answer to a region: why it refuses it, or None."""
        key = region.allocation.base, region.allocation.buffer_id
        del self._waiting[key]
        if refusal is None:
            self._has_event = True
            self.opened[key] = region
        else:
            if len(self._refused) >= _MAX_REGIONS:
                self._refused.clear()  # rather than remembering what may be gone for long
            self._refused[key] = refusal

    def record(self) -> None:
        """Makes the event of the connection done when everything is that arrays of the next call depend on.

        Raises:
            GpuError: CUDA fails.
        """
        assert self._gpu is not None, "a region was made"
        self._gpu.record(self._event)

    def gone(self) -> Iterator[bytes]:
        """Yields DROP frames for allocations that have been freed."""
        for key, region in list(self.opened.items()):
            if not self._is_there(region.allocation):
                yield self._dropped(key)

    def surplus(self) -> Iterator[bytes]:
        """Yields DROP frames for allocations that make way for others."""
        while len(self.opened) > _MAX_REGIONS:
            yield self._dropped(next(iter(self.opened)))

    def _dropped(self, key: tuple[int, int]) -> bytes:
        return FrameHeader(FrameKind.DROP, number=self.opened.pop(key).number).pack()

    def _is_there(self, allocation: Allocation) -> bool:
        assert self._gpu is not None, "a region was made"
        try:
            return self._gpu.allocation_of(allocation.base).buffer_id == allocation.buffer_id
        except GpuError:
            return False

    def _made(self, gpu: Gpu, allocation: Allocation) -> GpuRegion:
        if self._gpu is None:
            self._event = gpu.new_event()
            self._gpu = gpu
        return GpuRegion(next(self._numbers), allocation, gpu.memory_handle(allocation.base))
