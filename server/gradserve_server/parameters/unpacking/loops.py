"""The kernel that adds packed values up; see `adder`. Importing this imports Numba.

Each value is unpacked as the codecs of `gradserve_protocol` do it, multiplied and added, each operation rounded by
itself: the bits are those of unpacking first.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import DONE, count_up, load, read, store, widen
from gradserve_server.devices.host.reduction_loops import array_at

_TAKEN = 1
"""The index of the counter of chunks taken."""


def add(
    spans: Any,
    codec: Any,
    is_first: Any,
    factor: Any,
    parts: Any,
    like_total: Any,
    like_byte: Any,
    like_int8: Any,
    like_scale: Any,
    like_half: Any,
    like_bfloat16: Any,
    counters: Any,
) -> None:
    """Computes total = value factor for the first update of a sum, and total += value factor for others.

    Args:
        spans: int64 [n, 3]: the number of values, and the addresses of the packed ones and of their totals. Each begins
            with a block.
        codec: int64, the number of the codec.
        is_first: int64, 1 for the first update.
        factor: S.
        parts: float32 [16], the values of 4 bits as parts of the scale.
        like_total: S [0].
        like_byte: uint8 [0].
        like_int8: int8 [0].
        like_scale: float32 [0].
        like_half: int16 [0], for float16.
        like_bfloat16: uint16 [0].
        counters: int64 [2], zeros.
    """
    chunk = count_up(counters, _TAKEN)
    while chunk < len(spans):
        size, packed, place = spans[chunk, 0], spans[chunk, 1], spans[chunk, 2]
        if codec == 1:
            total, source = array_at(like_total, place, size), array_at(like_bfloat16, packed, size)
            if is_first:
                for index in range(size):
                    store(total, index, widen(total, load(source, index)) * factor)
            else:
                for index in range(size):
                    store(total, index, read(total, index) + widen(total, load(source, index)) * factor)
        elif codec == 2:
            _add_int8(size, packed, place, is_first, factor, like_total, like_int8, like_scale)
        elif codec == 3:
            for begin in range(0, size, 32):
                start = packed + begin // 32 * 18
                scale = load(array_at(like_half, start, 1), 0)
                total = array_at(like_total, place + begin * like_total.itemsize, min(32, size - begin))
                _add_nibbles(total, array_at(like_byte, start + 2, 16), scale, is_first, factor, parts)
        elif codec == 4:
            for begin in range(0, size, 256):
                start = packed + begin // 256 * 132
                scale = load(array_at(like_scale, start, 1), 0)
                total = array_at(like_total, place + begin * like_total.itemsize, min(256, size - begin))
                _add_nibbles(total, array_at(like_byte, start + 4, 128), scale, is_first, factor, parts)
        else:
            _add_largest(size, packed, place, is_first, factor, like_total, like_byte, like_scale)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable
def _add_int8(
    size: Any, packed: Any, place: Any, is_first: Any, factor: Any, like_total: Any, like_int8: Any, like_scale: Any
) -> None:
    most = np.float32(127)
    for begin in range(0, size, 256):
        start, count = packed + begin // 256 * 260, min(256, size - begin)
        scale = load(array_at(like_scale, start, 1), 0)
        numbers = array_at(like_int8, start + 4, count)
        total = array_at(like_total, place + begin * like_total.itemsize, count)
        if is_first:
            for index in range(count):
                store(total, index, widen(total, np.float32(load(numbers, index)) / most * scale) * factor)
        else:
            for index in range(count):
                value = widen(total, np.float32(load(numbers, index)) / most * scale)
                store(total, index, read(total, index) + value * factor)


@register_jitable
def _add_nibbles(total: Any, pairs: Any, scale: Any, is_first: Any, factor: Any, parts: Any) -> None:
    """Adds the values of one block of 4 bits each."""
    size = len(total)
    for index in range(size // 2):
        pair = pairs[index]
        low, high = widen(total, parts[pair & 15] * scale) * factor, widen(total, parts[pair >> 4] * scale) * factor
        if is_first:
            total[2 * index], total[2 * index + 1] = low, high
        else:
            total[2 * index] += low
            total[2 * index + 1] += high
    if size % 2:
        last = widen(total, parts[pairs[size // 2] & 15] * scale) * factor
        if is_first:
            total[size - 1] = last
        else:
            total[size - 1] += last


@register_jitable
def _add_largest(
    size: Any, packed: Any, place: Any, is_first: Any, factor: Any, like_total: Any, like_byte: Any, like_scale: Any
) -> None:
    """Adds the kept values of chunks, and zeros, which turn -0 into 0, to all others."""
    for begin in range(0, size, 4096):
        start, count = packed + begin // 4096 * 116, min(4096, size - begin)
        kept = min(64, count)
        ends = (kept + 1) // 2 * 3
        scale = load(array_at(like_scale, start, 1), 0)
        places, codes = array_at(like_byte, start + 4, ends), array_at(like_byte, start + 4 + ends, (kept + 3) // 4)
        total = array_at(like_total, place + begin * like_total.itemsize, count)
        zero, after = factor * 0, 0
        for number in range(kept + 1):
            index = count
            if number < kept:
                first = number // 2 * 3
                if number % 2:
                    index = np.int64(places[first + 1]) >> 4 | np.int64(places[first + 2]) << 4
                else:
                    index = np.int64(places[first]) | (np.int64(places[first + 1]) & 15) << 8
            for other in range(after, index):
                total[other] = zero if is_first else total[other] + zero
            if number < kept:
                code = codes[number // 4] >> number % 4 * 2 & 3
                part = np.float32(0)
                if code == 1:
                    part = np.float32(1)
                elif code == 3:
                    part = np.float32(-1)
                value = widen(total, part * scale) * factor
                total[index] = value if is_first else total[index] + value
            after = index + 1
