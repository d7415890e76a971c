"""Refuses requests of very many small parts before they are parsed.

A part of two bytes takes dozens of bytes once it is parsed, so a request within the limit of its length can still
take a multiple of it. Here the parts are counted in the bytes, as far as they lead to memory: contents of tensors are
skipped by their length.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.wire_format import DELIMITED, FIXED32, FIXED64, VARINT, read_varint

UNCHECKED_BYTES = 1 << 16
"""Requests of up to this length have not enough parts to matter."""
MAX_PARTS = 1 << 20
"""The most parts: more than twice as many as the largest request within the limits of the contract has."""
_AT_ONCE = 1000
"""Parts counted on the event loop. A request with more goes on in a thread."""
_SHORT_BYTES = 64
_NUMBERS_PER_PART = 8
_LONGEST_LIST_BYTES = 1 << 10
"""In lists of numbers of a byte or more each that are longer, each number is a part: it takes eight bytes once it is
parsed. In shorter ones, eight are."""

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
"""Types whose numbers take four or eight bytes each."""


@dataclass(eq=False)
class _Shape:
    """What the parts of a message can be.

    Attributes:
        messages: The fields that are messages.
        numbers: The fields that are lists of numbers: whether these may take a single byte each.
    """

    messages: dict[int, "_Shape"] = field(default_factory=dict)
    numbers: dict[int, bool] = field(default_factory=dict)


class PartCounter:
    """Counts the parts of serialized requests of one type."""

    def __init__(
        self, message: Descriptor, *, unchecked_bytes: int = UNCHECKED_BYTES, max_parts: int = MAX_PARTS
    ) -> None:
        """Takes the type, the length of requests that need no check, and the most parts of others."""
        self._shape = _shape_of(message, {})
        self._unchecked_bytes = unchecked_bytes
        self._max_parts = max_parts

    async def check(self, data: bytes) -> bool:
        """Checks that a request has not too many parts; returns whether it has so many that they take long to parse.

        Raises:
            InvalidArgumentError: It has too many.
        """
        if len(data) <= self._unchecked_bytes:
            return False
        counting = _Counting.of(data, self._shape)
        if not counting.go_on(_AT_ONCE):
            await asyncio.to_thread(counting.go_on, self._max_parts + 1)
        if counting.num_parts > self._max_parts:
            raise InvalidArgumentError(f"the message has more than {self._max_parts} parts")
        return counting.num_parts > _AT_ONCE


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

        What is not valid ends it too: the parser gets no further either.
        """
        try:
            return self._count(most)
        except (IndexError, ValueError):
            return True

    def _count(self, most: int) -> bool:
        # One loop with local variables, because it runs for each part: it takes a quarter of the time.
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
                    tag, position = read_varint(data, position - 1)
                kind = tag & 7
                if kind == DELIMITED:
                    length = data[position]
                    position += 1
                    if length & 0x80:
                        length, position = read_varint(data, position - 1)
                    inside = position + length
                    if inside > end:
                        raise ValueError("it ends in a part")
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
                elif kind == VARINT:
                    while data[position] & 0x80:
                        position += 1
                    position += 1
                elif kind == FIXED64:
                    position += 8
                elif kind == FIXED32:
                    position += 4
                else:
                    # Groups, which no message here has, would be parsed as unknown fields.
                    num_parts = max(MAX_PARTS, most) + 1
                    raise ValueError("it has groups")
        finally:
            self.position, self.num_parts = position, num_parts


def _shape_of(message: Descriptor, known: dict[str, _Shape]) -> _Shape:
    shape = known.get(message.full_name)
    if shape is None:
        shape = known[message.full_name] = _Shape()
        fields: Mapping[str, FieldDescriptor] = message.fields_by_name
        for part in fields.values():
            if part.message_type is not None:
                shape.messages[part.number] = _shape_of(part.message_type, known)
            elif part.is_repeated and part.type in _PACKABLE:
                shape.numbers[part.number] = part.type not in _FIXED
    return shape
