"""Payloads on Unix sockets, where tensors lie in memory that client and server share."""

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from mmap import mmap
from typing import Any

import numpy as np

from gradserve.calls.exchange import Progress
from gradserve.transport.sockets.gpu_regions import GpuRegion, GpuRegions, NotSharedError
from gradserve.transport.sockets.payloads import Incoming, Outgoing, Payloads, Placed
from gradserve_protocol.arrays import Array
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.frames import ALIGNMENT, FrameError, FrameHeader, FrameKind, Segment
from gradserve_protocol.gpu import GpuArray, failures
from gradserve_protocol.memory.pool import MIN_BYTES, BufferPool, Region, RegionPool
from gradserve_protocol.memory.sealed import RegionError, map_region
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import socket_messages_pb2, tensor_pb2

GPU_ARRAYS_IN_PLACE = "in place"
_PIECE_BYTES = 1 << 20
"""The most bytes that are copied between two reports of progress."""


class _Read(np.ndarray[Any, np.dtype[np.uint8]]):
    """The array at the root of all arrays of one read of a region. When it is garbage-collected, the read has ended."""


class RegionPayloads(Payloads):
    """Payloads of a connection to a Unix socket.

    Arrays of `client.empty` are read by the server where they are. Others are first copied to a region, which is still
    faster than sending them. What lies in the server's regions is read in place if the call allows it, or copied.
    """

    has_regions = True

    def __init__(
        self,
        pool: BufferPool,
        regions: RegionPool,
        report: Callable[[str], object] = lambda _: None,
        *,
        shares_gpu: bool = True,
    ) -> None:
        """Takes memory, and the text about arrays of a GPU.

        Args:
            pool: The memory of received arrays.
            regions: The memory that is shared.
            report: Told how arrays of a GPU travel.
            shares_gpu: Whether memory of a GPU may be handed over.
        """
        super().__init__(pool)
        self._regions = regions
        self._shares_gpu = shares_gpu
        self._gpu = GpuRegions(b"", "")
        self._report = report
        self._handed_over: dict[int, weakref.ref[Region]] = {}
        self._gone: deque[int] = deque()
        """The regions handed over that are gone since the last call. Filled by finalizers, in any thread."""
        self._refused: set[int] = set()
        self._lent: Sequence[Region] = ()
        """The regions with parts of the call that is under way."""
        self._scratch: Array | None = None
        """Copies that this call lends."""
        self._lends_gpu = False
        """True if the current call lends memory of a GPU."""
        self._mapped: dict[int, mmap] = {}
        self._reads: dict[int, _Read] = {}
        """The reads that the current reply has begun, by region."""
        self._num_reads = 0
        """The reads of which the server does not know that they have ended."""
        self._copies = True
        self._ended: deque[int] = deque()
        """The regions of reads that have ended since the last call. Filled by finalizers, in any thread."""

    @property
    def lends_memory(self) -> bool:
        return bool(self._lent) or self._lends_gpu

    @property
    def reads_in_place(self) -> bool:
        return self._num_reads > len(self._ended)

    def welcomed(self, welcome: socket_messages_pb2.Welcome, /) -> None:
        if self._shares_gpu:
            self._gpu = GpuRegions(welcome.gpu, welcome.why_no_gpu)
        else:
            self._gpu = GpuRegions(b"", "GRADSERVE_GPU_ARRAYS asks for copies")

    def outgoing(self, contents: Contents | None, progress: Progress | None = None, /) -> Outgoing:
        self.returned()
        prefix = b"".join(self._gpu.gone()) if self._gpu.opened else b""
        if self._gone or self._ended:
            prefix += b"".join((*self._farewells_to_mine(), *self._releases()))
        if contents is not None and contents.elsewhere:
            return self._with_gpu(contents, prefix, progress)
        if contents is None or contents.num_bytes < MIN_BYTES:
            outgoing = super().outgoing(contents)
            return replace(outgoing, prefix=prefix) if prefix else outgoing
        return self._in_segments(contents.buffers, [], prefix, progress)

    def _with_gpu(self, contents: Contents, prefix: bytes, progress: Progress | None) -> Outgoing:
        """Returns what to send for a payload with arrays of a GPU: where they are, or copies of them."""
        segments, regions, copied = list[Segment](), dict[int, GpuRegion](), list[int]()
        reason = ""
        for start, array in contents.elsewhere.items():
            assert isinstance(array, GpuArray), "no other arrays are outside host memory"
            try:
                place = self._gpu.place_of(array)
            except NotSharedError as error:
                reason = str(error)
                copied.append(start)
            else:
                segments.append(Segment(start, array.nbytes, place.region.number, place.offset))
                if not self._gpu.is_open(place.region):
                    regions[place.region.number] = place.region
        if regions:
            return Outgoing(prefix, new_regions=tuple(regions.values()))
        self._report(f"copied to the host: {reason}" if reason else GPU_ARRAYS_IN_PLACE)
        if contents.is_written and reason:
            return Outgoing(prefix, is_possible=False)
        is_on_gpu = bool(segments)
        outgoing = self._in_segments(contents.with_copies(copied), segments, prefix, progress)
        if is_on_gpu and not outgoing.new_regions:
            self._lends_gpu = True
            with failures():
                self._gpu.record()
        return outgoing

    def _in_segments(
        self, buffers: Mapping[int, memoryview], segments: list[Segment], prefix: bytes, progress: Progress | None
    ) -> Outgoing:
        """Returns what to send for buffers, beside what has segments already."""
        regions: dict[int, Region] = {}
        others: dict[int, memoryview] = {}
        for (start, buffer), part in zip(buffers.items(), self._regions.find(buffers.values()), strict=True):
            if part is None or part.offset % ALIGNMENT or part.region.number in self._refused:
                others[start] = buffer
            else:
                regions[part.region.number] = part.region
                segments.append(Segment(start, len(buffer), part.region.number, part.offset))
        scratch, following = None, list[bytes | memoryview]()
        if others and (scratch := self._copied(others, progress)) is not None:
            (found,) = self._regions.find([scratch.data])
            assert found is not None, "the copies are in a region"
            regions[found.region.number] = found.region
            offset = 0
            for start, buffer in others.items():
                segments.append(Segment(start, len(buffer), found.region.number, offset))
                offset += len(buffer) + -len(buffer) % ALIGNMENT
        else:
            offset = 0
            for start, buffer in others.items():
                segments.append(Segment(start, len(buffer), 0, offset))
                following += [buffer, bytes(-len(buffer) % ALIGNMENT)]
                offset += len(buffer) + -len(buffer) % ALIGNMENT
        segments.sort()
        new = [region for number, region in regions.items() if number not in self._handed_over]
        self._lent, self._scratch = tuple(regions.values()), scratch
        return Outgoing(prefix, tuple(segments), following, new)

    def handing_over(self, region: Region | GpuRegion, /) -> tuple[bytes, int | None]:
        if isinstance(region, GpuRegion):
            with failures():
                return self._gpu.frame_of(region), None
        header = FrameHeader(FrameKind.REGION, number=region.number, size=region.num_bytes)
        return header.pack(), region.descriptor

    def handed_over(self, region: Region | GpuRegion, refusal: GradserveError | None, /) -> None:
        if isinstance(region, GpuRegion):
            self._gpu.handed_over(region, None if refusal is None else refusal.message)
        elif refusal is None:
            gone, number = self._gone, region.number
            self._handed_over[number] = weakref.ref(region, lambda _: gone.append(number))
        else:
            self._refused.add(region.number)

    def returned(self) -> None:
        self._lent, self._scratch, self._lends_gpu = (), None, False

    def withdraw(self) -> None:
        for each in self._lent:
            self._regions.withdraw(each)
        self.returned()

    def notice(self, header: FrameHeader, descriptors: Sequence[int], /) -> None:
        try:
            match header.kind, descriptors:
                case FrameKind.REGION, [descriptor]:
                    self._mapped[header.number] = map_region(descriptor, header.size)
                case FrameKind.DROP, []:
                    self._mapped.pop(header.number, None)
                case _:
                    raise FrameError(f"expected a REPLY, or a region, got {header} with {len(descriptors)} descriptors")
        except RegionError as error:
            raise FrameError(str(error)) from None
        finally:
            for each in descriptors:
                os.close(each)

    def incoming(
        self,
        tensors: Sequence[tensor_pb2.Tensor],
        segments: Sequence[Segment],
        num_following: int,
        progress: Progress | None = None,
        /,
        *,
        in_place: bool,
    ) -> Incoming:
        self._reads.clear()
        for number in {each.region for each in segments if each.region}:
            memory = self._mapped.get(number)
            if memory is None:
                raise FrameError(f"expected a region that the server has handed over, got {number}")
            read = _Read((len(memory),), np.uint8, memory)
            read.flags.writeable = False
            weakref.finalize(read, self._ended.append, number).atexit = False
            self._reads[number] = read
            self._num_reads += 1
        self._copies = not in_place
        try:
            return super().incoming(tensors, segments, num_following, progress, in_place=in_place)
        finally:
            self._reads.clear()

    def farewells(self) -> Sequence[bytes]:
        surplus = self._gpu.surplus() if self._gpu.opened else ()
        return [*surplus, *(self._releases() if self._ended else ())]

    def _in_regions(self, places: Sequence[Placed], progress: Progress | None) -> Sequence[Array]:
        shared: list[Array] = []
        for placed in places:
            read = self._reads[placed.region]
            end = placed.place + placed.num_bytes
            if end > read.size:
                raise FrameError(f"expected a place in a region, got {placed}")
            shared.append(read[placed.place : end].view(np.ndarray).view(placed.dtype).reshape(placed.shape))
        if not self._copies:
            return shared
        arrays = [self._pool.empty(placed.shape, placed.dtype) for placed in places]
        for array, each in zip(arrays, shared, strict=True):
            if progress is None:
                np.copyto(array, each)
            else:
                _copy(array, each, progress)
        return arrays

    def _copied(self, buffers: Mapping[int, memoryview], progress: Progress | None) -> Array | None:
        """Returns copies of buffers in a region, one after the other; None if there is no memory for them."""
        try:
            num_bytes = max(sum([len(each) + -len(each) % ALIGNMENT for each in buffers.values()]), MIN_BYTES)
            scratch = self._regions.empty((num_bytes,), np.dtype(np.uint8))
        except MemoryError:
            return None
        (found,) = self._regions.find([scratch.data])
        if found is None or found.region.number in self._refused:
            return None
        offset = 0
        for buffer in buffers.values():
            place = scratch[offset : offset + len(buffer)]
            if progress is None:
                np.copyto(place, np.frombuffer(buffer, np.uint8))
            else:
                _copy(place, np.frombuffer(buffer, np.uint8), progress)
            offset += len(buffer) + -len(buffer) % ALIGNMENT
        return scratch

    def _releases(self) -> list[bytes]:
        counts = Counter[int]()
        while self._ended:
            counts[self._ended.popleft()] += 1
            self._num_reads -= 1
        return [FrameHeader(FrameKind.RELEASE, number=number, size=count).pack() for number, count in counts.items()]

    def _farewells_to_mine(self) -> list[bytes]:
        """Returns DROP frames for regions that are gone."""
        frames = []
        while self._gone:
            number = self._gone.popleft()
            del self._handed_over[number]
            frames.append(FrameHeader(FrameKind.DROP, number=number).pack())
        return frames


def _copy(to: Array, given: Array, progress: Progress) -> None:
    """Copies an array piece by piece, and tells a progress about it."""
    target, source = (each.reshape(-1).view(np.uint8) for each in (to, given))
    for start in range(0, len(source), _PIECE_BYTES):
        part = slice(start, start + _PIECE_BYTES)
        np.copyto(target[part], source[part])
        progress.moved(len(source[part]))
