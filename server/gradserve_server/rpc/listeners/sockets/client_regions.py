"""The regions of memory that a client has handed over on its connection."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gradserve.memory.sealed import RegionError, map_region
from gradserve.wire.frames import FrameError
from gradserve_server.tensors.quotas import Quota


class ClientRegions:
    """The regions of one connection, mapped read-only. They have no names and end with the connection.

    They count with their declared sizes: reading an empty memory file takes memory that its owner does not pay for.
    """

    def __init__(self, quota: Quota) -> None:
        """Takes the quota of bytes of all clients' regions."""
        self._quota = quota
        self._regions: dict[int, NDArray[np.uint8]] = {}

    def add(self, number: int, num_bytes: int, descriptor: int) -> None:
        """Maps a region.

        Raises:
            FrameError: It is not a region that can be mapped safely, or the number is taken or 0.
            ResourceExhaustedError: All regions together would be too large.
        """
        if number == 0 or number in self._regions:
            raise FrameError(f"expected a new number other than 0 for a region, got {number}")
        self._quota.acquire(num_bytes)
        try:
            memory = np.frombuffer(map_region(descriptor, num_bytes), np.uint8)
        except BaseException as error:
            self._quota.release(num_bytes)
            if isinstance(error, RegionError):
                raise FrameError(str(error)) from None
            raise
        self._regions[number] = memory

    def drop(self, number: int) -> None:
        """Forgets a region.

        Raises:
            FrameError: There is none with this number.
        """
        region = self._regions.pop(number, None)
        if region is None:
            raise FrameError(f"expected the number of a region, got {number}")
        self._quota.release(region.size)

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
        sizes: Mapping[int, int] = {number: region.size for number, region in self._regions.items()}
        self._regions.clear()
        self._quota.release(sum(sizes.values()))
