"""Serializes replies of very many parts in slices, because all other threads wait while protobuf works on a message."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from gradserve.wire.tensors import varint
from gradserve_server.rpc.boundary.wire_format import DELIMITED

T = TypeVar("T")

PARTS_AT_ONCE = 512
"""The most parts of a message that is made as a whole, which takes up to 3 ms."""
_SLICE = 256


@dataclass(frozen=True, slots=True)
class Serialized:
    """A message that is serialized already."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Returns its bytes."""
        return self.data


def repeated(things: Iterable[T], message_of: Callable[[Sequence[T]], Message]) -> Iterator[bytes]:
    """Yields a repeated field in serialized parts.

    Args:
        things: The entries, which may be made while they are iterated over.
        message_of: Returns a message with some of them, and with nothing else.
    """
    left = iter(things)
    while some := list(islice(left, _SLICE)):
        yield message_of(some).SerializeToString()


def within(message: type[Message], field: str, parts: Iterable[bytes]) -> bytes:
    """Returns a field that is a message, in serialized form.

    Args:
        message: The type of the message around it.
        field: The name of the field.
        parts: The serialized fields of the message within.
    """
    descriptor: Any = message.DESCRIPTOR
    inner = b"".join(parts)
    return b"".join((varint(descriptor.fields_by_name[field].number << 3 | DELIMITED), varint(len(inner)), inner))
