"""Messages as they arrive and leave, parsed and serialized without keeping other threads waiting.

Protobuf holds the GIL while it works on a message. So requests of very many parts are parsed in slices, and replies of
as many serialized in slices. A message in two runs of whole fields, parsed one after the other into the same object,
equals the message parsed at once. So does a field that is a message: it may come in two, each with a run of its fields.

Requests of very many small parts are refused before they are parsed. A part of two bytes takes dozens of bytes once it
is parsed, so a request within the length limit could still take a multiple of it. The parts are counted in the
serialized bytes; the contents of tensors, which are one part each, are skipped by their length.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from gradserve_protocol.tensors import varint
from gradserve_server.devices.compute import FEW_PIECES, Compute
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.runtime.event_loop import batched

UNCHECKED_BYTES = 1 << 16
"""Requests of up to this length have too few parts to matter."""
MAX_PARTS = 1 << 20
"""The most parts of a request: more than twice as many as the largest within the limits of the contract has."""
SLICE_BYTES = 1 << 15
"""The bytes of a request that are parsed in one step: that many fields take up to 2 ms."""
_COUNTED_AT_ONCE = 1000
"""The most parts counted on the event loop; a thread counts the rest."""
_SHORT_BYTES = 64
_NUMBERS_PER_PART = 8
_LONGEST_LIST_BYTES = 1 << 10
"""In a longer list of numbers that may take a single byte, each byte counts as a part, because a parsed number takes
eight. In shorter lists, eight bytes count as one part."""

_PACKABLE = {
    kind
    for kind in range(1, FieldDescriptor.MAX_TYPE + 1)
    if kind
    not in (
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
        FieldDescriptor.TYPE_MESSAGE,
        FieldDescriptor.TYPE_GROUP,
    )
}
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE,
    FieldDescriptor.TYPE_FLOAT,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
}
"""Types whose numbers take four or eight bytes each on the wire."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
"""Protobuf's kinds of fields, in the lowest three bits of a tag."""

MessageT = TypeVar("MessageT", bound=Message)
Decode: TypeAlias = Callable[[bytes], Any]


@dataclass(frozen=True)
class MalformedMessage:
    """Stands for a message that could not be parsed, and says why."""

    reason: str


class RequestReader:
    """Reads serialized requests of one type."""

    def __init__(self, message: Descriptor, decoder: Callable[[Callable[[bytes], Any]], Decode] | None = None) -> None:
        message_class = message_factory.GetMessageClass(message)

        def parse_long(data: bytes) -> Any:
            return parse_in_slices(message_class, data)

        if decoder is None:
            self._decode, self._decode_long = tolerant(message_class.FromString), tolerant(parse_long)
        else:
            self._decode, self._decode_long = tolerant(decoder(message_class.FromString)), tolerant(decoder(parse_long))
        self._parts = PartCounter(message)

    async def read(self, data: bytes) -> Any:
        """Returns a request, or a MalformedMessage.

        Raises:
            InvalidArgumentError: It has too many parts.
        """
        if len(data) > UNCHECKED_BYTES and await self._parts.check(data):
            return await asyncio.to_thread(self._decode_long, data)
        return self._decode(data)


def tolerant(decode: Decode) -> Decode:
    """Makes a decoder return a MalformedMessage instead of raising: gRPC would send its errors as UNKNOWN."""

    def decode_or_say_why(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError as error:
            return MalformedMessage(str(error))

    return decode_or_say_why


def parse_in_slices(message_class: Callable[[], Any], data: bytes, slice_bytes: int = SLICE_BYTES) -> Any:
    """Parses a message in steps, between which other threads run.

    Raises:
        DecodeError: It is not valid.
    """
    message = message_class()
    for part in slices(data, message.DESCRIPTOR, slice_bytes):
        message.MergeFromString(part)
    return message


def slices(data: bytes, message: Descriptor, slice_bytes: int) -> Iterator[bytes]:
    """Cuts a serialized message into messages of about `slice_bytes` each, which merge into the whole.

    Leaves anything that is invalid or cannot be cut as it is, for the parser to judge.
    """
    return _slices(data, 0, len(data), message, slice_bytes)


def _slices(data: bytes, begin: int, end: int, message: Descriptor, slice_bytes: int) -> Iterator[bytes]:
    position = begin
    while position < end:
        field = position
        try:
            tag, position = _read_varint(data, position)
            kind = tag & 7
            if kind == _DELIMITED:
                length, inside = _read_varint(data, position)
                position = inside + length
            elif kind == _VARINT:
                _, position = _read_varint(data, position)
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:
                break
        except (IndexError, ValueError):
            break
        if position > end:
            break
        if kind == _DELIMITED and length > slice_bytes:
            inner = message.fields_by_number.get(tag >> 3)
            if inner is not None and inner.message_type is not None and not inner.is_repeated:
                if begin < field:
                    yield data[begin:field]
                for part in _slices(data, inside, position, inner.message_type, slice_bytes):
                    yield varint(tag) + varint(len(part)) + part
                begin = position
        if position - begin >= slice_bytes:
            yield data[begin:position]
            begin = position
    if begin < end:
        yield data[begin:end]


class PartCounter:
    """Counts the parts of serialized requests of one type."""

    def __init__(
        self, message: Descriptor, *, unchecked_bytes: int = UNCHECKED_BYTES, max_parts: int = MAX_PARTS
    ) -> None:
        self._shape = _shape_of(message)
        self._unchecked_bytes = unchecked_bytes
        self._max_parts = max_parts

    async def check(self, data: bytes) -> bool:
        """Returns whether a request has so many parts that it must be parsed in slices.

        Raises:
            InvalidArgumentError: It has more parts than are allowed.
        """
        if len(data) <= self._unchecked_bytes:
            return False
        counting = _Counting.of(data, self._shape)
        if not counting.go_on(_COUNTED_AT_ONCE):
            await asyncio.to_thread(counting.go_on, self._max_parts + 1)
        if counting.num_parts > self._max_parts:
            raise InvalidArgumentError(f"the message has more than {self._max_parts} parts")
        return counting.num_parts > _COUNTED_AT_ONCE


@dataclass(eq=False)
class _Shape:
    """The fields of a message type that can hold many parts, by number.

    Attributes:
        messages: The fields that are messages.
        numbers: The fields that are lists of numbers, and whether a number may take a single byte.
    """

    messages: dict[int, "_Shape"] = field(default_factory=dict)
    numbers: dict[int, bool] = field(default_factory=dict)


@dataclass
class _Counting:
    data: bytes
    outer: list[tuple[int, _Shape]]
    position: int = 0
    num_parts: int = 0

    @classmethod
    def of(cls, data: bytes, shape: _Shape) -> Self:
        return cls(data, [(len(data), shape)])

    def go_on(self, most: int) -> bool:
        """Counts until there are more than `most` parts; returns True at the end of the message.

        Invalid bytes end the count too: the parser gets no further either.
        """
        try:
            return self._count(most)
        except (IndexError, ValueError):
            return True

    def _count(self, most: int) -> bool:
        # One loop with local variables takes a quarter of the time, and it runs once per part.
        data, outer = self.data, self.outer
        position, num_parts = self.position, self.num_parts
        end, shape = outer[-1]
        try:
            while True:
                while position >= end:
                    outer.pop()
                    if not outer:
                        return True
                    end, shape = outer[-1]
                if num_parts > most:
                    return False
                num_parts += 1
                tag = data[position]
                position += 1
                if tag & 0x80:
                    tag, position = _read_varint(data, position - 1)
                kind = tag & 7
                if kind == _DELIMITED:
                    length = data[position]
                    position += 1
                    if length & 0x80:
                        length, position = _read_varint(data, position - 1)
                    inside = position + length
                    if inside > end:
                        raise ValueError("a part ends beyond the message")
                    number = tag >> 3
                    inner = shape.messages.get(number)
                    if inner is None:
                        if number in shape.numbers:
                            is_long = length > _LONGEST_LIST_BYTES and shape.numbers[number]
                            num_parts += length if is_long else length // _NUMBERS_PER_PART
                        position = inside
                    elif not inner.messages and length <= _SHORT_BYTES:
                        num_parts += length // _NUMBERS_PER_PART
                        position = inside
                    elif length:
                        end, shape = inside, inner
                        outer.append((end, shape))
                elif kind == _VARINT:
                    while data[position] & 0x80:
                        position += 1
                    position += 1
                elif kind == _FIXED64:
                    position += 8
                elif kind == _FIXED32:
                    position += 4
                else:
                    # No message here has groups; they would be parsed as unknown fields.
                    num_parts = max(MAX_PARTS, most) + 1
                    raise ValueError("it has groups")
        finally:
            self.position, self.num_parts = position, num_parts


@functools.cache  # every server has a hundred methods, in two listeners
def _shape_of(message: Descriptor) -> _Shape:
    return _shape_in(message, {})


def _shape_in(message: Descriptor, known: dict[str, _Shape]) -> _Shape:
    shape = known.get(message.full_name)
    if shape is None:
        shape = known[message.full_name] = _Shape()
        fields: Mapping[str, FieldDescriptor] = message.fields_by_name
        for part in fields.values():
            if part.message_type is not None:
                shape.messages[part.number] = _shape_in(part.message_type, known)
            elif part.is_repeated and part.type in _PACKABLE:
                shape.numbers[part.number] = part.type not in _FIXED
    return shape


@dataclass(frozen=True, slots=True)
class Serialized:
    """A message in serialized form."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Returns its bytes."""
        return self.data


@dataclass(frozen=True)
class Entries:
    """A piece of a message: more entries of a repeated field.

    Attributes:
        field: The name of the field.
        messages: The entries, which may be generated lazily.
    """

    field: str
    messages: Iterable[Message]


Piece: TypeAlias = "Message | Entries | tuple[str, Iterable[Piece]]"
"""A part of a message: some of its fields, entries of one, or the name of one and the pieces of the message in it."""


async def assembled(
    compute: Compute, num_parts: int, message: MessageT, pieces: Iterable[Piece]
) -> MessageT | Serialized:
    """Returns a message with the fields in `pieces`, which follow those that it has.

    A message of many parts is serialized piece by piece in a thread.

    Args:
        compute: Provides the thread.
        num_parts: The approximate number of parts of the pieces, such as tensors.
        message: The message without them.
        pieces: The pieces.
    """
    if num_parts <= FEW_PIECES:
        _merge(message, pieces)
        return message
    return await compute.run_in_thread(
        lambda: Serialized(b"".join([message.SerializeToString(), *_serialized(message.DESCRIPTOR, pieces)]))
    )


def _merge(message: Message, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        if isinstance(piece, Message):
            message.MergeFrom(piece)
        elif isinstance(piece, Entries):
            getattr(message, piece.field).extend(piece.messages)
        else:
            name, inner = piece
            field: Any = getattr(message, name)
            if not isinstance(field, Message):  # it is repeated
                field = field.add()
            field.SetInParent()
            _merge(field, inner)


def _serialized(message: Any, pieces: Iterable[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        if isinstance(piece, Message):
            yield piece.SerializeToString()
        elif isinstance(piece, Entries):
            kind = message_factory.GetMessageClass(message)
            for some in batched(piece.messages):
                yield kind(**{piece.field: some}).SerializeToString()
        else:
            part = message.fields_by_name[piece[0]]
            inner = b"".join(_serialized(part.message_type, piece[1]))
            yield varint(part.number << 3 | _DELIMITED) + varint(len(inner))
            yield inner


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it.

    Raises:
        IndexError: The data end within the number.
        ValueError: The number has more than ten bytes.
    """
    value = data[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has more than ten bytes")
