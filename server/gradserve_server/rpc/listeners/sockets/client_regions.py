"""The regions of memory that a client has handed over on its connection."""

import contextlib
import resource

import numpy as np
from numpy.typing import NDArray

from gradserve.memory.mapped import MappedArray, MappedMemory
from gradserve.memory.sealed import RegionError, map_region
from gradserve.wire.frames import FrameError
from gradserve_server.rpc.listeners.sockets.fair_sockets import FairSockets
from gradserve_server.security.identity import ANONYMOUS

_MAX_MAPS = 16384
"""Linux allows a process 65530 maps."""


def max_regions() -> int:
    """Returns how many regions of clients a server maps: each takes a map and, in Python, a descriptor."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_MAPS if descriptors == resource.RLIM_INFINITY else min(descriptors // 2, _MAX_MAPS)


class ClientRegions:
    """The regions of one connection, mapped read-only. They have no names and end with the connection.

    They count with their declared sizes: reading an empty memory file takes memory that its owner does not pay for.
    """

    def __init__(self, sockets: FairSockets) -> None:
        """Takes what counts the regions of all clients."""
        self.owner = ANONYMOUS
        """The identity whose regions they are; known once the connection is open."""
        self._sockets = sockets
        self._regions: dict[int, NDArray[np.uint8]] = {}

    def add(self, number: int, num_bytes: int, descriptor: int) -> None:
        """Maps a region.

        Raises:
            FrameError: It is not a region that can be mapped safely, or the number is taken or 0.
            ResourceExhaustedError: See `FairSockets.add_region`.
        """
        if number == 0 or number in self._regions:
            raise FrameError(f"expected a new number other than 0 for a region, got {number}")
        with contextlib.ExitStack() as on_failure:
            self._sockets.add_region(self.owner, num_bytes)
            on_failure.callback(self._sockets.drop_region, self.owner, num_bytes)
            try:
                memory = MappedMemory(map_region(descriptor, num_bytes))
            except RegionError as error:
                raise FrameError(str(error)) from None
            self._regions[number] = MappedArray.of(memory, num_bytes)
            on_failure.pop_all()

    def drop(self, number: int) -> None:
        """Forgets a region.

        Raises:
            FrameError: There is none with this number.
        """
        region = self._regions.pop(number, None)
        if region is None:
            raise FrameError(f"expected the number of a region, got {number}")
        self._sockets.drop_region(self.owner, region.size)

    def part(self, number: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a part of a region, read-only.

        Raises:
            FrameError: There is no such part.
        """
        region = self._regions.get(number)
        if region is None:
            raise FrameError(f"expected the number of a region, got {number}")
        if offset + num_bytes > region.size:
            raise FrameError(
                f"expected a segment within the {region.size} bytes of region {number}, got one of {num_bytes} "
                f"at {offset}"
            )
        return region[offset : offset + num_bytes]

    def close(self) -> None:
        """Forgets all regions."""
        for number in list(self._regions):
            self.drop(number)
