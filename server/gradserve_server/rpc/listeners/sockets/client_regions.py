"""The regions of memory that a client has handed over on its connection."""

import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from gradserve.memory.sealed import RegionError, map_region
from gradserve.wire.frames import FrameError
from gradserve_server.devices.device import Array, SharedEvent
from gradserve_server.rpc.listeners.sockets.fair_sockets import FairSockets
from gradserve_server.security.identity import ANONYMOUS

_MAX_MAPS = 16384
"""Linux allows a process 65530 maps."""


def max_regions() -> int:
    """Returns how many regions of clients a server maps: each takes a map and, in Python, a descriptor."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_MAPS if descriptors == resource.RLIM_INFINITY else min(descriptors // 2, _MAX_MAPS)


@dataclass(frozen=True, eq=False)
class RegionPart:
    """A part of a region, or all of it.

    Attributes:
        memory: Its bytes, one-dimensional, of dtype uint8.
        on_gpu: Whether they are in memory of the GPU; otherwise they are read-only.
    """

    memory: Array
    on_gpu: bool


class ClientRegions:
    """The regions of one connection: of the host, mapped read-only, and of the GPU. They end with the connection.

    They count with their declared sizes: reading an empty memory file takes memory that its owner does not pay for.
    """

    def __init__(self, sockets: FairSockets) -> None:
        """Takes what counts the regions of all clients."""
        self.owner = ANONYMOUS
        """The identity whose regions they are; known once the connection is open."""
        self._sockets = sockets
        self._regions: dict[int, RegionPart] = {}
        self.event: SharedEvent | None = None
        """Done when the client's work on the GPU is that the latest call depends on; it came with the first region."""

    def add(self, number: int, num_bytes: int, descriptor: int) -> None:
        """Maps a region.

        Raises:
            FrameError: It is not a region that can be mapped safely, or the number is taken or 0.
            ResourceExhaustedError: See `FairSockets.add_region`.
        """
        with self._counted(number, num_bytes, on_gpu=False):
            try:
                memory = np.frombuffer(map_region(descriptor, num_bytes), np.uint8)
            except RegionError as error:
                raise FrameError(str(error)) from None
            self._regions[number] = RegionPart(memory, on_gpu=False)

    async def add_on_gpu(self, number: int, num_bytes: int, open_memory: Callable[[], Awaitable[Array]]) -> None:
        """Adds a region in the memory of the GPU, which a function opens.

        Raises:
            FrameError: The number is taken or 0.
            ResourceExhaustedError: See `FairSockets.add_region`.
            SharingError: It cannot be opened.
        """
        with self._counted(number, num_bytes, on_gpu=True):
            self._regions[number] = RegionPart(await open_memory(), on_gpu=True)

    def drop(self, number: int) -> None:
        """Forgets a region.

        Raises:
            FrameError: There is none with this number.
        """
        region = self._regions.pop(number, None)
        if region is None:
            raise FrameError(f"expected the number of a region, got {number}")
        self._sockets.drop_region(self.owner, region.memory.nbytes, on_gpu=region.on_gpu)

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
        with ExitStack() as on_failure:
            self._sockets.add_region(self.owner, num_bytes, on_gpu=on_gpu)
            on_failure.callback(self._sockets.drop_region, self.owner, num_bytes, on_gpu=on_gpu)
            yield
            on_failure.pop_all()
