"""The kernels of element-wise arithmetic on lists of arrays; see `reduction`. Importing this imports Numba.

`spans` is int64 [n, m]: the number of elements of a span, and the address of its first element in each of the arrays.
`firsts` is int64 [chunks + 1]: the first span of each chunk, and n. Products are rounded before they are added, as in
NumPy.
"""

from typing import Any

from numba import types
from numba.np.arrayobj import populate_array

from gradserve_server.devices.host.intrinsics import DONE, count_up, intrinsic, load, read, store


@intrinsic
def array_at(typing_context: Any, like: Any, address: Any, count: Any) -> Any:
    """Returns the `count` elements at an address as an array of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(like)(context, builder)
        element = context.get_data_type(like.dtype)
        num_bytes = context.get_constant(types.intp, context.get_abi_sizeof(element))
        data = builder.inttoptr(args[1], element.as_pointer())
        layout: dict[str, Any] = {"shape": [args[2]], "strides": [num_bytes], "itemsize": num_bytes, "meminfo": None}
        populate_array(array, data=data, **layout)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return like(like, address, count), generate


_TAKEN = 1
"""The index of the counter of chunks taken."""

_COPIED = 1 << 12
"""The elements that are copied before they are looked at: they stay in the first cache."""


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


def copy(
    spans: Any, firsts: Any, largest: Any, like_source: Any, like_out: Any, non_finite: Any, counters: Any
) -> None:
    """Copies sources, and notes the chunks whose copies have a value that is infinite or NaN.

    Args:
        spans: The spans of sources and outs.
        firsts: The first span of each chunk.
        largest: S, the largest finite number of the sources.
        like_source: G [0].
        like_out: G [0].
        non_finite: int64 [chunks], zeros; 1 for a chunk with such a value.
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        is_finite = True
        for span in range(firsts[chunk], firsts[chunk + 1]):
            for begin in range(0, spans[span, 0], _COPIED):
                count, offset = min(_COPIED, spans[span, 0] - begin), begin * like_out.itemsize
                source = array_at(like_source, spans[span, 1] + offset, count)
                out = array_at(like_out, spans[span, 2] + offset, count)
                for index in range(count):
                    store(out, index, load(source, index))
                for index in range(count):  # what was copied, as others may change the source
                    is_finite &= abs(read(out, index)) <= largest
        if not is_finite:
            non_finite[chunk] = 1
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


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
