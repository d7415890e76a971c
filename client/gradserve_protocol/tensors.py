"""Tensors as protobuf carries them: in a message, beside it, or in the chunks of a stream.

Protobuf copies a `bytes` field into its message, that message into the enclosing one, and so on, and once more when
serializing. So larger contents stay outside the message. On a socket they follow it as a payload. For gRPC they are
spliced into the serialized bytes, which the generated classes read as usual; that is the only copy.

The streams `PutTensorsRequest` and `GetTensorsResponse` have one format: a header message in field 1, or
`bytes chunk = 2`. The generated classes copy a `bytes` field several times between array and socket. Here a chunk is
joined from memoryviews when it is written, and read as a memoryview of the received message. The generated classes read
and write the same bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from numpy.typing import DTypeLike

from gradserve_protocol.arrays import (
    DTYPES,
    HOST_ARRAYS,
    AnyArray,
    Array,
    DType,
    ElsewhereArray,
    buffer_of,
    parse_dtype,
)
from gradserve_protocol.frames import ALIGNMENT
from gradserve_protocol.v1 import tensor_pb2

DEFAULT_CHUNK_BYTES = 1 << 20
_MIN_BYTES = 1 << 14
"""The least size kept beside the message; less is copied faster."""
_MIN_EACH = 1 << 10
"""The least average size of tensors beside the message: many small ones are sent and received faster within it."""
_PADDING = bytes(ALIGNMENT)
_CONTENT = tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["content"].number
_LENGTH_DELIMITED = 2
_CHUNK_TAG = b"\x12"  # Field 2, length-delimited.
_MAX_VARINT_BYTES = 5
_DTYPES: dict[tensor_pb2.DataType, DType] = {
    getattr(tensor_pb2, f"DATA_TYPE_{name.upper()}"): dtype for name, dtype in DTYPES.items()
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}


@cache
def to_dtype(data_type: tensor_pb2.DataType) -> DType:
    """Returns the NumPy dtype of a wire type.

    Raises:
        ValueError: The type is unspecified or not known to this version.
    """
    try:
        return _DTYPES[data_type]
    except KeyError:
        raise ValueError(f"expected a known DataType, got {data_type}") from None


@lru_cache(maxsize=256)
def to_data_type(dtype: DTypeLike) -> tensor_pb2.DataType:
    """Returns the wire type of a NumPy dtype, or of anything that names one ("bfloat16" included).

    Raises:
        TypeError: No wire type has this dtype.
    """
    return _DATA_TYPES[parse_dtype(dtype)]


@dataclass
class Contents:
    """The payload beside one message: the contents of its larger tensors.

    Attributes:
        buffers: The contents by `payload_offset`, in ascending order.
        num_bytes: The length of the payload.
        elsewhere: Arrays outside host memory, likewise; a connection that cannot send them from there sends copies.
        is_written: Whether the server writes to the arrays in `elsewhere`, so that copies cannot replace them.
        is_kept: True if the buffers are also kept elsewhere.
    """

    is_kept: ClassVar[bool] = False
    buffers: dict[int, memoryview] = field(default_factory=dict)
    num_bytes: int = 0
    elsewhere: dict[int, ElsewhereArray] = field(default_factory=dict)
    is_written: bool = False
    _copies: dict[int, memoryview] = field(default_factory=dict)

    def tensor(self, array: Array) -> tensor_pb2.Tensor:
        """Returns the tensor of an array, for the message to which these contents belong."""
        (tensor,) = self.tensors([array])
        return tensor

    def tensors(self, arrays: Sequence[AnyArray]) -> list[tensor_pb2.Tensor]:
        """Returns the tensors of arrays, for the message to which these contents belong.

        Either all of them are in the message or all beside it: the receiver can then use the memory of the payload,
        rather than copying a few of many tensors.
        """
        return list(self.each_tensor(arrays))

    def each_tensor(self, arrays: Sequence[AnyArray], *, beside: bool = True) -> Iterator[tensor_pb2.Tensor]:
        """Yields what `tensors` returns, for a message that is built piece by piece.

        Args:
            arrays: The arrays.
            beside: False if all of them must be in the message.
        """
        # In one function: it is called for every tensor of every call.
        if beside:
            beside = sum([array.nbytes for array in arrays]) >= max(_MIN_BYTES, _MIN_EACH * len(arrays))
            for array in arrays:
                beside = beside or not isinstance(array, HOST_ARRAYS)
        for array in arrays:
            tensor = tensor_pb2.Tensor(dtype=to_data_type(array.dtype), shape=array.shape)
            if not beside or not array.nbytes:
                tensor.content = (array if isinstance(array, HOST_ARRAYS) else array.to_host()).tobytes()
            else:
                offset = self.num_bytes + -self.num_bytes % ALIGNMENT
                if isinstance(array, HOST_ARRAYS):
                    self.buffers[offset] = array.reshape(-1).view(np.uint8).data
                else:
                    self.elsewhere[offset] = array
                self.num_bytes = offset + array.nbytes
                tensor.payload_offset = offset
            yield tensor

    def on_host(self) -> "Contents":
        """Returns the same contents with all arrays in host memory."""
        if not self.elsewhere:
            return self
        return Contents(self.with_copies(self.elsewhere), self.num_bytes)

    def with_copies(self, offsets: Iterable[int]) -> dict[int, memoryview]:
        """Returns the buffers, with host copies of some arrays of `elsewhere`; each copy is made once."""
        for offset in offsets:
            if offset not in self._copies:
                self._copies[offset] = buffer_of(self.elsewhere[offset].to_host())
        return dict(sorted((self.buffers | {offset: self._copies[offset] for offset in offsets}).items()))

    def pieces(self) -> list[memoryview | bytes]:
        """Returns the pieces of the payload, with zeros for the gaps."""
        pieces: list[memoryview | bytes] = []
        end = 0
        for offset, buffer in self.on_host().buffers.items():
            if offset > end:
                pieces.append(_PADDING[: offset - end])
            pieces.append(buffer)
            end = offset + len(buffer)
        return pieces


class Serializable(Protocol):
    """A message, or its serialized form."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        ...


class WithContents(NamedTuple):
    """A message, and the contents beside it."""

    message: Serializable
    contents: Contents


def encode_message(message: Serializable | WithContents) -> bytes:
    """Serializes a message for gRPC, with the contents beside it spliced in."""
    if not isinstance(message, WithContents):
        return message.SerializeToString()
    contents = message.contents.on_host()
    if not contents.buffers:
        return message.message.SerializeToString()
    return b"".join(_pieces(message.message, contents))


def tensors_beside(message: Any) -> list[tensor_pb2.Tensor]:
    """Returns the tensors of a message whose elements are beside it, in no particular order."""
    found = []
    left = [message]
    while left:
        each = left.pop()
        if isinstance(each, tensor_pb2.Tensor):
            if each.WhichOneof("data") == "payload_offset":
                found.append(each)
            continue
        for part, value in each.ListFields():
            if part.message_type is None or not _has_tensors(part.message_type):
                continue
            if part.message_type.GetOptions().map_entry:
                left += value.values()
            elif part.is_repeated:
                left += value
            else:
                left.append(value)
    return found


class Part(Protocol):
    """A generated stream message: a oneof of `header` and `chunk`."""

    chunk: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802
        ...

    def WhichOneof(self, oneof_group: str, /) -> str | None:  # noqa: N802
        ...


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next bytes of a payload, joined when the message is written."""

    pieces: tuple[memoryview, ...]
    num_bytes: int


def cut(payload: Iterable[memoryview], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts a payload into chunks of `chunk_bytes` (the last may be shorter), wherever its buffers end."""
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
    """Parses messages of one generated type, chunks without copying them."""

    def __init__(self, parse: Callable[[bytes], PartT]) -> None:
        self._parse = parse

    def __call__(self, message: bytes) -> PartT | memoryview:
        """Returns the payload of a chunk as a view of `message`; parses any other message.

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


def _pieces(message: Any, contents: Contents) -> list[bytes | memoryview]:
    if isinstance(message, tensor_pb2.Tensor):
        if message.WhichOneof("data") != "payload_offset":
            return [message.SerializeToString()]
        content = contents.buffers[message.payload_offset]
        spec = tensor_pb2.Tensor(dtype=message.dtype, shape=message.shape)
        return [spec.SerializeToString(), *_delimited(_CONTENT, [content])]
    rest = type(message)()
    rest.CopyFrom(message)
    pieces: list[bytes | memoryview] = []
    for part, value in message.ListFields():
        if part.message_type is not None and _has_tensors(part.message_type):
            rest.ClearField(part.name)
            for each in _messages(part, value):
                pieces += _delimited(part.number, _pieces(each, contents))
    return [rest.SerializeToString(), *pieces]


def _messages(part: FieldDescriptor, value: Any) -> Iterable[Message]:
    """Returns the messages of a field; a map is a list of entries on the wire."""
    assert part.message_type is not None
    if part.message_type.GetOptions().map_entry:
        entry = message_factory.GetMessageClass(part.message_type)
        return [entry(key=key, value=each) for key, each in value.items()]
    messages: Iterable[Message] = value if part.is_repeated else [value]
    return messages


def _delimited(number: int, value: list[bytes | memoryview]) -> list[bytes | memoryview]:
    length = sum(len(piece) for piece in value)
    return [varint(number << 3 | _LENGTH_DELIMITED) + varint(length), *value]


@cache
def _has_tensors(message: Descriptor) -> bool:
    return message.full_name == tensor_pb2.Tensor.DESCRIPTOR.full_name or any(
        part.message_type is not None and _has_tensors(part.message_type) for part in message.fields
    )


def _payload_start(message: bytes) -> int | None:
    """Returns where the payload starts if a single chunk field fills the message; None if protobuf has to parse it."""
    length = 0
    for index, byte in enumerate(message[1 : 1 + _MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            start = index + 2
            return start if start + length == len(message) else None
    return None


def varint(number: int) -> bytes:
    """Returns a number in protobuf's varint encoding."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
