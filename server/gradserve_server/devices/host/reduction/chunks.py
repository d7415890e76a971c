"""Cuts lists of arrays into chunks of about equal size, whatever the sizes of the arrays."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


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


def addresses(
    rows: Sequence[tuple[NDArray[Any], ...]], chunks: Sequence[Sequence[Span]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the spans for kernels, and the first one of each chunk; see `loops`.

    Without NumPy, whose calls take longer than the few numbers that there mostly are.
    """
    places = [[array.ctypes.data for array in row] for row in rows]
    sizes = [array.itemsize for array in rows[0]]
    spans: list[list[int]] = []
    firsts = [0]
    for chunk in chunks:
        for which, begin, end in chunk:
            spans.append([end - begin, *map(operator.add, places[which], [begin * size for size in sizes])])
        firsts.append(len(spans))
    return np.array(spans, np.int64), np.array(firsts, np.int64)
