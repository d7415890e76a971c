"""The zero-copy codec of the two streams that carry tensor payload.

`PutTensorsRequest` and `GetTensorsResponse` are alike on the wire: either a header message in field 1 or
`bytes chunk = 2`. The generated classes copy a `bytes` field several times between array and socket. Here a
chunk is spliced together from memoryviews when written, and read as a memoryview of the received message.
The generated classes read and write the same bytes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

DEFAULT_CHUNK_BYTES = 1 << 20

_CHUNK_TAG = b"\x12"  # Field 2, length-delimited.
_MAX_VARINT_BYTES = 5


class Part(Protocol):
    """A generated stream message: a oneof of `header` and `chunk`."""

    chunk: bytes

    def SerializeToString(self) -> bytes:  # noqa: D102, N802
        ...

    def WhichOneof(self, oneof_group: str, /) -> str | None:  # noqa: D102, N802
        ...


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next bytes of a payload, joined when the message is written."""

    pieces: tuple[memoryview, ...]
    num_bytes: int


def cut(payload: Iterable[memoryview], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts a payload into chunks of `chunk_bytes`, the last one shorter, regardless of where its buffers end."""
    pieces: list[memoryview] = []
    room = chunk_bytes
    for buffer in payload:
        offset = 0
        while offset < len(buffer):
            piece = buffer[offset : offset + room]
            pieces.append(piece)
            offset += len(piece)
            room -= len(piece)
            if room == 0:
                yield Chunk(tuple(pieces), chunk_bytes)
                pieces, room = [], chunk_bytes
    if pieces:
        yield Chunk(tuple(pieces), chunk_bytes - room)


def encode_part(part: Part | Chunk) -> bytes:
    """Serializes a header message or a chunk, copying the payload once."""
    if isinstance(part, Chunk):
        return b"".join((_CHUNK_TAG, varint(part.num_bytes), *part.pieces))
    return part.SerializeToString()


class PartDecoder(Generic[PartT]):
    """Parses messages of one generated type; chunks without copying."""

    def __init__(self, parse: Callable[[bytes], PartT]) -> None:
        self._parse = parse

    def __call__(self, message: bytes) -> PartT | memoryview:
        """Returns the payload of a chunk as a view of `message`, or any other message parsed.

        Raises:
            google.protobuf.message.DecodeError: `message` is not of this type.
        """
        if message[:1] == _CHUNK_TAG:
            start = _payload_start(message)
            if start is not None:
                return memoryview(message)[start:]
        part = self._parse(message)
        if part.WhichOneof("part") == "chunk":
            return memoryview(part.chunk)
        return part


def varint(number: int) -> bytes:
    """Returns a number in protobuf's varint encoding."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _payload_start(message: bytes) -> int | None:
    """Returns where the payload starts if one chunk field fills the message; None for protobuf to parse it."""
    length = 0
    for index, byte in enumerate(message[1 : 1 + _MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            start = index + 2
            return start if start + length == len(message) else None
    return None
