"""Cuts the bytes of many arrays into spans of one size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradserve_server.devices.device import Array

SLOT_BYTES = 4 << 20
"""What is copied to or from a GPU at a time. The bus takes a tenth of a millisecond, as long as a thread to wake up."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an array.

    Attributes:
        array: The array.
        offset: Where the part begins there, in bytes.
        num_bytes: Its size.
        place: Where it is in its span.
    """

    array: Array
    offset: int
    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Span:
    """Parts of arrays that are copied together.

    Attributes:
        parts: The parts, in ascending order.
        num_bytes: The size of the span, with what is between and behind them.
    """

    parts: Sequence[Part]
    num_bytes: int


def spans(arrays: Iterable[Array], slot_bytes: int, alignment: int = 1) -> Iterator[Span]:
    """Cuts the bytes of arrays into spans of `slot_bytes`, the last one shorter.

    Args:
        arrays: The arrays.
        slot_bytes: The size of a span, a multiple of the alignment.
        alignment: Each array begins at a multiple of this.
    """
    parts: list[Part] = []
    place = 0
    for array in arrays:
        offset = 0
        while offset < array.nbytes:
            if not offset:
                place = aligned(place, alignment)
            if place == slot_bytes:
                yield Span(parts, place)
                parts, place = [], 0
            size = min(array.nbytes - offset, slot_bytes - place)
            parts.append(Part(array, offset, size, place))
            offset, place = offset + size, place + size
    if parts:
        yield Span(parts, place)


def aligned(place: int, alignment: int) -> int:
    """Returns the first multiple of an alignment from a place on."""
    return -(-place // alignment) * alignment
