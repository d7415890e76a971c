"""The server's regions that a client reads in place, over one connection."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gradserve.wire.frames import FrameError, FrameHeader, FrameKind, Segment, aligned
from gradserve_server.devices.host.shared_blocks import SharedBlock, block_of


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload as a client of the machine gets it.

    Attributes:
        segments: The places of its parts; none if all of it follows the message.
        pieces: What follows the message.
        new: The blocks that the client does not know yet.
    """

    segments: list[Segment]
    pieces: list[memoryview | bytes]
    new: list[SharedBlock]


class ServerRegions:
    """The blocks that the client of a connection knows, and those it is reading."""

    def __init__(self) -> None:
        self._known: dict[int, SharedBlock] = {}
        self._reads: Counter[int] = Counter()
        self._holds: dict[int, object] = {}
        self._dropped: list[SharedBlock] = []
        """The blocks of the latest DROP frames, which the client may still have mapped, so that they count."""

    def show(self, buffers: Mapping[int, memoryview]) -> Shown:
        """Begins a read of each block that a reply has tensors in.

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
        return Shown(segments, pieces, new)

    def release(self, header: FrameHeader) -> None:
        """Ends reads of a block.

        Raises:
            FrameError: The client reads it less often.
        """
        number, count = header.number, header.size
        if not 0 < count <= self._reads[number]:
            raise FrameError(f"expected 1 to {self._reads[number]} reads of region {number} to end, got {count}")
        self._reads[number] -= count
        if not self._reads[number]:
            del self._reads[number]
            del self._holds[number]

    def forget_unused(self) -> list[bytes]:
        """Returns the DROP frames of blocks that will not be used again, so that the client unmaps them."""
        gone = [number for number, block in self._known.items() if block.is_retired and not self._reads[number]]
        self._dropped += [self._known.pop(number) for number in gone]
        return [FrameHeader(FrameKind.DROP, number=number).pack() for number in gone]

    def begin_call(self) -> None:
        """Notes a call: the client has read all that was sent before the reply to the call before."""
        self._dropped.clear()

    def close(self) -> None:
        """Ends the connection's reads: what the client may still be reading is never written again."""
        for number in self._reads:
            self._known[number].is_spoilt = True
        self._reads.clear()
        self._holds.clear()
        self._known.clear()
        self._dropped.clear()
