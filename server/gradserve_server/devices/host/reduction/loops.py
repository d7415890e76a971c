"""The loops of element-wise arithmetic on lists of arrays; see `kernels`.

`spans` is int64 [n, m]: the number of elements of a span, and the address of its first element in each of the arrays.
`firsts` is int64 [chunks + 1]: the first span of each chunk, and n. Products are rounded before they are added, as in
NumPy.
"""

from typing import Any

from gradserve_server.devices.host.intrinsics import DONE, count_up, load, read, store
from gradserve_server.devices.host.reduction.addresses import array_at

_TAKEN = 1
"""The index of the counter of chunks taken."""


def scale(spans: Any, firsts: Any, factor: Any, like_source: Any, like_out: Any, counters: Any) -> None:
    """Computes out = source factor.

    Args:
        spans: The spans of sources and outs.
        firsts: The first span of each chunk.
        factor: S.
        like_source: G [0].
        like_out: S [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            source, out = array_at(like_source, spans[span, 1], size), array_at(like_out, spans[span, 2], size)
            for index in range(size):
                store(out, index, load(source, index) * factor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def add_scaled(spans: Any, firsts: Any, factor: Any, like_sum: Any, like_source: Any, counters: Any) -> None:
    """Computes sum += source factor.

    Args:
        spans: The spans of sums and sources.
        firsts: The first span of each chunk.
        factor: S.
        like_sum: S [0].
        like_source: G [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            total, source = array_at(like_sum, spans[span, 1], size), array_at(like_source, spans[span, 2], size)
            for index in range(size):
                store(total, index, read(total, index) + load(source, index) * factor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def divide(spans: Any, firsts: Any, divisor: Any, like_sum: Any, like_out: Any, counters: Any) -> None:
    """Computes out = sum / divisor.

    Args:
        spans: The spans of sums and outs.
        firsts: The first span of each chunk.
        divisor: S.
        like_sum: S [0].
        like_out: G [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            total, out = array_at(like_sum, spans[span, 1], size), array_at(like_out, spans[span, 2], size)
            for index in range(size):
                store(out, index, load(total, index) / divisor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def divide_in_place(spans: Any, firsts: Any, divisor: Any, like_sum: Any, counters: Any) -> None:
    """Computes sum /= divisor.

    Args:
        spans: The spans of sums.
        firsts: The first span of each chunk.
        divisor: S.
        like_sum: S [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            total = array_at(like_sum, spans[span, 1], size)
            for index in range(size):
                store(total, index, read(total, index) / divisor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def add_and_divide(
    spans: Any, firsts: Any, factor: Any, divisor: Any, like_sum: Any, like_source: Any, like_out: Any, counters: Any
) -> None:
    """Computes out = (sum + source factor) / divisor.

    Args:
        spans: The spans of sums, sources and outs.
        firsts: The first span of each chunk.
        factor: S.
        divisor: S.
        like_sum: S [0].
        like_source: G [0].
        like_out: G [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            total, source = array_at(like_sum, spans[span, 1], size), array_at(like_source, spans[span, 2], size)
            out = array_at(like_out, spans[span, 3], size)
            for index in range(size):
                store(out, index, (load(total, index) + load(source, index) * factor) / divisor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def add_and_divide_in_place(
    spans: Any, firsts: Any, factor: Any, divisor: Any, like_sum: Any, like_source: Any, counters: Any
) -> None:
    """Computes sum = (sum + source factor) / divisor.

    Args:
        spans: The spans of sums and sources.
        firsts: The first span of each chunk.
        factor: S.
        divisor: S.
        like_sum: S [0].
        like_source: G [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            size = spans[span, 0]
            total, source = array_at(like_sum, spans[span, 1], size), array_at(like_source, spans[span, 2], size)
            for index in range(size):
                store(total, index, (read(total, index) + load(source, index) * factor) / divisor)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)
