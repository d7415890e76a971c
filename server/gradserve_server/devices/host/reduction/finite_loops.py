"""The loop that finds values that are not finite; see `loops` for its arguments."""

from typing import Any

from gradserve_server.devices.host.intrinsics import DONE, count_up, load
from gradserve_server.devices.host.reduction.addresses import array_at

_TAKEN = 1
"""The index of the counter of chunks taken."""


def find_non_finite(spans: Any, firsts: Any, largest: Any, like_source: Any, found: Any, counters: Any) -> None:
    """Finds the first value of each chunk that is infinite or NaN.

    Args:
        spans: The spans of sources.
        firsts: The first span of each chunk.
        largest: S, the largest finite number of the sources.
        like_source: G [0].
        found: int64 [chunks, 2]. For a chunk that has such a value: the index of its span, and its position there.
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        span = firsts[chunk]
        while span < firsts[chunk + 1]:
            source, is_finite = array_at(like_source, spans[span, 1], spans[span, 0]), True
            for index in range(len(source)):
                is_finite &= abs(load(source, index)) <= largest
            if not is_finite:
                position = 0
                while abs(load(source, position)) <= largest:
                    position += 1
                found[chunk, 0], found[chunk, 1] = span, position
                break
            span += 1
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)
