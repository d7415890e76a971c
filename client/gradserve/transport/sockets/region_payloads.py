"""Payloads on Unix sockets, where tensors of replies may lie in regions of the server's memory."""

import os
from collections import Counter
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from gradserve.memory.pool import BufferPool
from gradserve.memory.sealed import RegionError, map_region
from gradserve.transport.sockets.payloads import FollowingPayloads, Incoming, Placed
from gradserve.v1 import tensor_pb2
from gradserve.wire.dtypes import to_dtype
from gradserve.wire.frames import FrameError, FrameHeader, FrameKind, Segment
from gradserve.wire.payload import Array


class RegionPayloads(FollowingPayloads):
    """Payloads of a connection to a Unix socket. What lies in the server's regions is copied to new arrays."""

    has_regions = True

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool)
        self._regions: dict[int, mmap] = {}
        self._read: Counter[int] = Counter()

    def notice(self, header: FrameHeader, descriptors: Sequence[int], /) -> None:
        """See `Payloads`."""
        try:
            match header.kind, descriptors:
                case FrameKind.REGION, [descriptor]:
                    self._regions[header.number] = map_region(descriptor, header.size)
                case FrameKind.DROP, []:
                    self._regions.pop(header.number, None)
                case _:
                    raise FrameError(f"expected a REPLY, or a region, got {header} with {len(descriptors)} descriptors")
        except RegionError as error:
            raise FrameError(str(error)) from None
        finally:
            for each in descriptors:
                os.close(each)

    def incoming(
        self, tensors: Sequence[tensor_pb2.Tensor], segments: Sequence[Segment], num_following: int, /
    ) -> Incoming:
        """See `Payloads`."""
        self._read.update({each.region for each in segments if each.region})
        return super().incoming(tensors, segments, num_following)

    def farewells(self) -> Sequence[bytes]:
        """See `Payloads`."""
        frames = [
            FrameHeader(FrameKind.RELEASE, number=number, size=times).pack() for number, times in self._read.items()
        ]
        self._read.clear()
        return frames

    def _in_region(self, placed: Placed) -> Array:
        memory = self._regions.get(placed.region, b"")
        array = self._pool.empty(tuple(placed.tensor.shape), to_dtype(placed.tensor.dtype))
        if placed.place + array.nbytes > len(memory):
            raise FrameError(f"expected a place in a region, got {placed}")
        np.copyto(array.reshape(-1).view(np.uint8), np.frombuffer(memory, np.uint8, array.nbytes, placed.place))
        return array
