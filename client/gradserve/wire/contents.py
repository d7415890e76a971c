"""Writes messages with inline tensors without copying the contents through protobuf.

Protobuf copies a `bytes` field into its message, that message into the one around it, and so on, and once more when
serializing. Here larger contents stay outside the message until it is written: the only copy is into the finished
bytes, which the generated classes read as usual.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gradserve.v1 import tensor_pb2
from gradserve.wire.chunks import varint
from gradserve.wire.dtypes import to_data_type
from gradserve.wire.payload import Array, buffer_of

_MIN_BYTES = 1 << 14
"""The least size kept outside; less is copied faster."""
_MARK = "\0"
"""The first character of a handle that stands for contents kept outside; no tensor's handle has it."""
_CONTENT = tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["content"].number
_LENGTH_DELIMITED = 2


@dataclass(frozen=True)
class Contents:
    """The larger contents of one message, kept outside it."""

    buffers: list[memoryview] = field(default_factory=list)

    def tensor(self, array: Array) -> tensor_pb2.Tensor:
        """Returns the inline tensor of an array, for the message to which these contents belong."""
        tensor = tensor_pb2.Tensor(dtype=to_data_type(array.dtype), shape=array.shape)
        if array.nbytes < _MIN_BYTES:
            tensor.content = bytes(buffer_of(array))
        else:
            tensor.handle = f"{_MARK}{len(self.buffers)}"
            self.buffers.append(buffer_of(array))
        return tensor


@dataclass(frozen=True)
class WithContents:
    """A message, and the contents to write into it."""

    message: Message
    contents: Contents


def is_stored(tensor: tensor_pb2.Tensor) -> bool:
    """Returns True if a tensor is the handle of a stored tensor."""
    return bool(tensor.handle) and not tensor.handle.startswith(_MARK)


def encode_message(message: Message | WithContents) -> bytes:
    """Serializes a message, including contents kept outside it."""
    if not isinstance(message, WithContents):
        return message.SerializeToString()
    if not message.contents.buffers:
        return message.message.SerializeToString()
    return b"".join(_pieces(message.message, message.contents))


def _pieces(message: Any, contents: Contents) -> list[bytes | memoryview]:
    if isinstance(message, tensor_pb2.Tensor):
        if not message.handle.startswith(_MARK):  # inline already, or stored
            return [message.SerializeToString()]
        content = contents.buffers[int(message.handle.removeprefix(_MARK))]
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
