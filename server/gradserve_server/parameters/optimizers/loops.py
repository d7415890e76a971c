"""The kernel of optimizers; see `stepping`. Importing this imports Numba.

M is the dtype of masters. `spans` is int64 [n, 7]: the number of elements of a span, and the addresses of its first
elements in the sum, the addend, the master, the result and two slots; those that a component lacks are not read.
`firsts` is int64 [chunks + 1]: the first span of each chunk, and n. `owners` is int64 [n]: the component of a span.

A span is computed in blocks that stay in the first cache: first the gradients, which lie in the result for as long,
then the step. Products are rounded before they are added, as in NumPy.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import DONE, count_up, load, read, store, widen
from gradserve_server.devices.host.reduction_loops import array_at
from gradserve_server.parameters.optimizers.optimizer import FLOAT16_ADDEND, NO_ADDEND, OWN_ADDEND, LoopCode

_TAKEN = 1
"""The index of the counter of chunks taken."""

_BLOCK = 256
"""The elements of a block: six arrays of float32 take 6 KiB. Large arrays mostly begin at the
same place in a page, and so share the sets of the cache: blocks of 1024 take a quarter longer."""

_SUM, _ADDEND, _MASTER, _RESULT, _FIRST_SLOT, _SECOND_SLOT = 1, 2, 3, 4, 5, 6

_FACTOR, _DIVISOR, _NUMBERS = 0, 1, 2
"""The columns of a component's numbers; those of the optimizer begin at _NUMBERS."""

_SGD, _MOMENTUM, _ADAM = int(LoopCode.SGD), int(LoopCode.MOMENTUM), int(LoopCode.ADAM)
_ADAGRAD, _ADAGRAD_OPTAX = int(LoopCode.ADAGRAD), int(LoopCode.ADAGRAD_OPTAX)


def step(
    spans: Any,
    firsts: Any,
    owners: Any,
    code: Any,
    has_sum: Any,
    addends: Any,
    numbers: Any,
    like: Any,
    like_float16: Any,
    like_bfloat16: Any,
    counters: Any,
) -> None:
    """Takes the step of an optimizer.

    Args:
        spans: The spans.
        firsts: The first span of each chunk.
        owners: The component of each span.
        code: The loop of the optimizer.
        has_sum: int64 [components], 0 where the addend is all there is.
        addends: int64 [components], the dtypes of the addends.
        numbers: M [components, k]: the factor of the addend, the divisor, and the numbers of the optimizer.
        like: M [0].
        like_float16: int16 [0].
        like_bfloat16: uint16 [0].
        counters: int64 [2], zeros.
    """
    itemsize, half = like.itemsize, like_float16.itemsize
    chunk = count_up(counters, _TAKEN)
    while chunk < len(firsts) - 1:
        for span in range(firsts[chunk], firsts[chunk + 1]):
            owner, end = owners[span], spans[span, 0]
            for begin in range(0, end, _BLOCK):
                count, offset = min(_BLOCK, end - begin), begin * itemsize
                total = array_at(like, spans[span, _SUM] + offset, count)
                master = array_at(like, spans[span, _MASTER] + offset, count)
                result = array_at(like, spans[span, _RESULT] + offset, count)
                first = array_at(like, spans[span, _FIRST_SLOT] + offset, count)
                second = array_at(like, spans[span, _SECOND_SLOT] + offset, count)
                row = numbers[owner]
                kind = addends[owner]
                if kind == NO_ADDEND:
                    _divide(total, row[_DIVISOR], result)
                elif kind == OWN_ADDEND:
                    addend = array_at(like, spans[span, _ADDEND] + offset, count)
                    _add_and_divide(has_sum[owner], total, addend, row, result)
                elif kind == FLOAT16_ADDEND:
                    addend_float16 = array_at(like_float16, spans[span, _ADDEND] + begin * half, count)
                    _add_and_divide(has_sum[owner], total, addend_float16, row, result)
                else:
                    addend_bfloat16 = array_at(like_bfloat16, spans[span, _ADDEND] + begin * half, count)
                    _add_and_divide(has_sum[owner], total, addend_bfloat16, row, result)
                if code == _SGD:
                    _sgd(row, master, result)
                elif code == _MOMENTUM:
                    _momentum(row, master, first, result)
                elif code == _ADAM:
                    _adam(row, master, first, second, result)
                elif code == _ADAGRAD:
                    _adagrad(row, master, first, result)
                elif code == _ADAGRAD_OPTAX:
                    _adagrad_optax(row, master, first, result)
                else:
                    _yogi(row, master, first, second, result)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable
def _divide(total: Any, divisor: Any, result: Any) -> None:
    for index in range(len(result)):
        store(result, index, load(total, index) / divisor)


@register_jitable
def _add_and_divide(has_sum: Any, total: Any, addend: Any, row: Any, result: Any) -> None:
    factor, divisor = row[_FACTOR], row[_DIVISOR]
    if has_sum:
        for index in range(len(result)):
            store(result, index, (load(total, index) + load(addend, index) * factor) / divisor)
    else:
        for index in range(len(result)):
            store(result, index, load(addend, index) * factor / divisor)


@register_jitable
def _sgd(row: Any, master: Any, result: Any) -> None:
    lr, decay = row[_NUMBERS], row[_NUMBERS + 1]
    for index in range(len(result)):
        p, g = load(master, index), read(result, index)
        g = g + decay * p if decay != 0 else g
        store(result, index, p - lr * g)


@register_jitable
def _momentum(row: Any, master: Any, buffer: Any, result: Any) -> None:
    lr, weight_decay, decay = row[_NUMBERS], row[_NUMBERS + 1], row[_NUMBERS + 2]
    fresh, ahead = row[_NUMBERS + 3], row[_NUMBERS + 4]
    for index in range(len(result)):
        p, g = load(master, index), read(result, index)
        g = g + weight_decay * p if weight_decay != 0 else g
        b = decay * read(buffer, index) + fresh * g
        store(buffer, index, b)
        store(result, index, p - lr * (g + ahead * b if ahead != 0 else b))


@register_jitable
def _adam(row: Any, master: Any, first: Any, second: Any, result: Any) -> None:
    rate, weight_decay, kept = row[_NUMBERS], row[_NUMBERS + 1], row[_NUMBERS + 2]
    weight, rest = row[_NUMBERS + 3], row[_NUMBERS + 4]
    beta2, fresh = row[_NUMBERS + 5], row[_NUMBERS + 6]
    correction, eps = row[_NUMBERS + 7], row[_NUMBERS + 8]
    is_near = weight < 0.5
    for index in range(len(result)):
        p, g = load(master, index), read(result, index)
        g = g + weight_decay * p if weight_decay != 0 else g
        m = read(first, index)
        m = m + weight * (g - m) if is_near else g - rest * (g - m)
        v = beta2 * read(second, index) + fresh * g * g
        store(first, index, m)
        store(second, index, v)
        store(result, index, kept * p - rate * m / (np.sqrt(v) / correction + eps))


@register_jitable
def _adagrad(row: Any, master: Any, squares: Any, result: Any) -> None:
    rate, weight_decay, eps = row[_NUMBERS], row[_NUMBERS + 1], row[_NUMBERS + 2]
    for index in range(len(result)):
        p, g = load(master, index), read(result, index)
        g = g + weight_decay * p if weight_decay != 0 else g
        s = read(squares, index) + g * g
        store(squares, index, s)
        store(result, index, p - rate * g / (np.sqrt(s) + eps))


@register_jitable
def _adagrad_optax(row: Any, master: Any, squares: Any, result: Any) -> None:
    lr, eps = row[_NUMBERS], row[_NUMBERS + 1]
    zero, one = widen(result, 0.0), widen(result, 1.0)
    for index in range(len(result)):
        g = read(result, index)
        s = read(squares, index) + g * g
        store(squares, index, s)
        scale = one / np.sqrt(s + eps) if s > zero else zero
        store(result, index, load(master, index) - lr * (scale * g))


@register_jitable
def _yogi(row: Any, master: Any, first: Any, second: Any, result: Any) -> None:
    lr, beta1, fresh, fresh_square = row[_NUMBERS], row[_NUMBERS + 1], row[_NUMBERS + 2], row[_NUMBERS + 3]
    correction, square_correction, eps = row[_NUMBERS + 4], row[_NUMBERS + 5], row[_NUMBERS + 6]
    zero, one = widen(result, 0.0), widen(result, 1.0)
    for index in range(len(result)):
        g = read(result, index)
        m = beta1 * read(first, index) + fresh * g
        v, square = read(second, index), g * g
        change = v - square
        sign = one if change > zero else (-one if change < zero else change)
        v = v - sign * (fresh_square * square)
        store(first, index, m)
        store(second, index, v)
        denominator = np.sqrt(v / square_correction) + eps
        store(result, index, load(master, index) - lr * (m / correction / denominator))
