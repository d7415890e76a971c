"""Parses requests: those of very many parts in slices, because all other threads wait while protobuf parses.

A message in two runs of whole fields, parsed one after the other into the same object, is the same as parsed at once.
That also goes for a field that is a message: it may come in two, each with a run of its fields.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor

from gradserve.wire.tensors import varint
from gradserve_server.rpc.boundary.density import UNCHECKED_BYTES, PartCounter
from gradserve_server.rpc.boundary.malformed import Decode, tolerant
from gradserve_server.rpc.boundary.wire_format import DELIMITED, FIXED32, FIXED64, VARINT, read_varint

SLICE_BYTES = 1 << 15
"""The bytes that are parsed in one step: as many fields take up to 2 ms."""


class RequestReader:
    """Reads serialized requests of one type."""

    def __init__(self, message: Descriptor, decoder: Callable[[Callable[[bytes], Any]], Decode] | None = None) -> None:
        """Takes the type, and what makes the decoder of its method from a parser, if it has one of its own."""
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


def parse_in_slices(message_class: Callable[[], Any], data: bytes, slice_bytes: int = SLICE_BYTES) -> Any:
    """Parses a message, in steps between which other threads run.

    Raises:
        DecodeError: It is not valid.
    """
    message = message_class()
    for part in slices(data, message.DESCRIPTOR, slice_bytes):
        message.MergeFromString(part)
    return message


def slices(data: bytes, message: Descriptor, slice_bytes: int) -> Iterator[bytes]:
    """Cuts a serialized message into messages of about `slice_bytes`, which merged are the whole one.

    What is not valid, or cannot be cut, is left to the parser as it is.
    """
    return _slices(data, 0, len(data), message, slice_bytes)


def _slices(data: bytes, begin: int, end: int, message: Descriptor, slice_bytes: int) -> Iterator[bytes]:
    position = begin
    while position < end:
        field = position
        try:
            tag, position = read_varint(data, position)
            kind = tag & 7
            if kind == DELIMITED:
                length, inside = read_varint(data, position)
                position = inside + length
            elif kind == VARINT:
                _, position = read_varint(data, position)
            elif kind in (FIXED32, FIXED64):
                position += 4 if kind == FIXED32 else 8
            else:
                break
        except (IndexError, ValueError):
            break
        if position > end:
            break
        if kind == DELIMITED and length > slice_bytes:
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
