"""Keeps the contents of larger tensors beside their message.

Protobuf copies a `bytes` field into its message, that message into the one around it, and so on, and once more when
serializing. Here larger contents stay outside the message. On a socket they follow it as a payload. For gRPC they are
written into the finished bytes, which the generated classes read as usual; that is the only copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gradserve.v1 import tensor_pb2
from gradserve.wire.chunks import varint
from gradserve.wire.dtypes import to_data_type
from gradserve.wire.frames import ALIGNMENT, aligned
from gradserve.wire.payload import HOST_ARRAYS, AnyArray, Array, ElsewhereArray, buffer_of, host_array

_MIN_BYTES = 1 << 14
"""The least size kept beside the message; less is copied faster."""
_MIN_EACH = 1 << 10
"""The least average size of tensors beside the message: many small ones are sent and received faster within it."""
_PADDING = bytes(ALIGNMENT)
_CONTENT = tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["content"].number
_LENGTH_DELIMITED = 2


@dataclass
class Contents:
    """The payload beside one message: the contents of its larger tensors.

    Attributes:
        buffers: The contents by `payload_offset`, in ascending order.
        num_bytes: The length of the payload.
        elsewhere: Arrays outside host memory, likewise; whoever cannot send them from there sends copies.
        is_written: Whether the server writes to the arrays that are elsewhere, so that no copy can take their place.
        is_kept: True if the buffers are kept elsewhere, too.
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
        """Yields what `tensors` returns, for a message that is made bit by bit.

        Args:
            arrays: The arrays.
            beside: False if they must be in the message in any case.
        """
        large = sum([array.nbytes for array in arrays]) >= max(_MIN_BYTES, _MIN_EACH * len(arrays))
        if beside and (large or any(not isinstance(array, HOST_ARRAYS) for array in arrays)):
            yield from map(self._add, arrays)
        else:
            for array in arrays:
                yield _described(array, content=host_array(array).tobytes())

    def on_host(self) -> "Contents":
        """Returns the same contents with all arrays in host memory."""
        if not self.elsewhere:
            return self
        return Contents(self.with_copies(self.elsewhere), self.num_bytes)

    def with_copies(self, offsets: Iterable[int]) -> dict[int, memoryview]:
        """Returns the buffers, and copies of some of the arrays that are elsewhere, which are made once."""
        for offset in offsets:
            if offset not in self._copies:
                self._copies[offset] = buffer_of(self.elsewhere[offset].to_host())
        return dict(sorted((self.buffers | {offset: self._copies[offset] for offset in offsets}).items()))

    def pieces(self) -> list[memoryview | bytes]:
        """Returns the payload in pieces, with zeros in the gaps."""
        pieces: list[memoryview | bytes] = []
        end = 0
        for offset, buffer in self.on_host().buffers.items():
            if offset > end:
                pieces.append(_PADDING[: offset - end])
            pieces.append(buffer)
            end = offset + len(buffer)
        return pieces

    def _add(self, array: AnyArray) -> tensor_pb2.Tensor:
        if not array.nbytes:
            return _described(array, content=b"")
        offset = aligned(self.num_bytes)
        if isinstance(array, HOST_ARRAYS):
            self.buffers[offset] = buffer_of(array)
        else:
            self.elsewhere[offset] = array
        self.num_bytes = offset + array.nbytes
        return _described(array, payload_offset=offset)


def _described(array: AnyArray, **data: Any) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=to_data_type(array.dtype), shape=array.shape, **data)


class Serializable(Protocol):
    """A message, or what is one already in serialized form."""

    def SerializeToString(self) -> bytes:  # noqa: D102, N802
        ...


class WithContents(NamedTuple):
    """A message, and the contents beside it."""

    message: Serializable
    contents: Contents


def encode_message(message: Serializable | WithContents) -> bytes:
    """Serializes a message for gRPC, with the contents beside it written into it."""
    if not isinstance(message, WithContents):
        return message.SerializeToString()
    contents = message.contents.on_host()
    if not contents.buffers:
        return message.message.SerializeToString()
    return b"".join(_pieces(message.message, contents))


def tensors_beside(message: Any) -> Iterator[tensor_pb2.Tensor]:
    """Yields the tensors of a message whose elements are beside it."""
    if isinstance(message, tensor_pb2.Tensor):
        if message.WhichOneof("data") == "payload_offset":
            yield message
        return
    for part, value in message.ListFields():
        if part.message_type is not None and _has_tensors(part.message_type):
            for each in _messages(part, value):
                yield from tensors_beside(each)


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
