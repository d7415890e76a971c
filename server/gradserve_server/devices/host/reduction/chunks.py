"""Cuts lists of arrays into chunks of about equal size, whatever the sizes of the arrays."""

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Elements of one array of a list.

    Attributes:
        array: The index of the array.
        begin: The first element.
        end: The element after the last.
    """

    array: int
    begin: int
    end: int


def cut(sizes: Iterable[int], chunk_size: int) -> list[list[Span]]:
    """Cuts arrays of the given sizes into chunks.

    Args:
        sizes: The number of elements of each array.
        chunk_size: The number of elements of every chunk but the last.

    Returns:
        The spans of each chunk, in order. None is empty.
    """
    chunks: list[list[Span]] = []
    room = 0
    for array, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if room == 0:
                chunks.append([])
                room = chunk_size
            end = min(begin + room, size)
            chunks[-1].append(Span(array, begin, end))
            room -= end - begin
            begin = end
    return chunks
