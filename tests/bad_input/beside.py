"""Requests with their tensors beside the message."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gradserve_protocol.frames import aligned
from gradserve_protocol.v1 import tensor_pb2

MessageT = TypeVar("MessageT", bound=Message)


def move_contents(request: MessageT) -> tuple[MessageT, bytes]:
    """Returns a request whose tensors have their contents in a payload, and that payload."""
    moved = type(request)()
    moved.CopyFrom(request)
    payload = b""
    for tensor in _tensors(moved):
        if tensor.content:
            content, offset = tensor.content, aligned(len(payload))
            payload = payload.ljust(offset, b"\0") + content
            tensor.payload_offset = offset
    return moved, payload


def _tensors(message: Any) -> Iterator[tensor_pb2.Tensor]:
    if isinstance(message, tensor_pb2.Tensor):
        yield message
        return
    for part, value in message.ListFields():
        if part.message_type is not None:
            for each in _messages(part, value):
                yield from _tensors(each)


def _messages(part: FieldDescriptor, value: Any) -> Iterable[Message]:
    assert part.message_type is not None
    if part.message_type.GetOptions().map_entry:
        return [each for each in value.values() if isinstance(each, Message)]
    messages: Iterable[Message] = value if part.is_repeated else [value]
    return messages
