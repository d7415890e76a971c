"""The kernels of activation functions on the host. Importing this imports Numba.

The functions of one element come first. They are branch-free, so that LLVM vectorises them; `spec` has the
definitions, and `reference` the formulas.

Each block of elements is copied and widened to the kernel's own memory, computed there, and rounded and copied to its
place. So results may replace inputs without special loops, and the functions are compiled for float32 and float64
only. A block stays in the first-level cache.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from gradserve_server.devices.host.activations import (
    INLINED,
    exponential,
    exponential_minus_1,
    hyperbolic_tangent,
    log_of_1_plus,
    number_like,
    one_like,
    sigmoid,
)
from gradserve_server.devices.host.intrinsics import DONE, count_up, read, write
from gradserve_server.ops.activation.spec import (
    BFLOAT16_ELEMENTS,
    FLOAT16_ELEMENTS,
    LEAKY_RELU_SLOPE,
    NAMES,
    NORMAL_TAIL_FLOAT32,
    NORMAL_TAIL_FLOAT64,
    NORMAL_TAIL_LARGEST,
    NORMAL_TAIL_SHIFT,
    SELU_SCALE,
    SELU_SCALE_ALPHA,
)

_INVERSE_SQRT_2_PI = 0.3989422804014327
_ALMOST_INFINITE = 1e30
_FLOAT32, _FLOAT64 = NORMAL_TAIL_FLOAT32, NORMAL_TAIL_FLOAT64


@register_jitable(**INLINED)
def relu(x: Any) -> Any:
    """The larger of x and 0."""
    return number_like(x, 0) if x <= 0 else x


@register_jitable(**INLINED)
def relu6(x: Any) -> Any:
    """Between 0 and 6."""
    x = number_like(x, 0) if x <= 0 else x
    return number_like(x, 6) if x > 6 else x


@register_jitable(**INLINED)
def elu(x: Any) -> Any:
    """x, or e^x - 1 for negative x."""
    negative = exponential_minus_1(-abs(x))
    return negative if x < 0 else x


@register_jitable(**INLINED)
def selu(x: Any) -> Any:
    """A scaled elu that preserves mean and variance."""
    negative = number_like(x, SELU_SCALE_ALPHA) * exponential_minus_1(-abs(x))
    return negative if x < 0 else number_like(x, SELU_SCALE) * x


@register_jitable(**INLINED)
def softplus(x: Any) -> Any:
    """The logarithm of 1 + e^x."""
    power, p = exponential(-abs(x))
    return relu(x) + log_of_1_plus(power * p + power)


@register_jitable(**INLINED)
def softsign(x: Any) -> Any:
    """The quotient of x and 1 + |x|."""
    limit = number_like(x, _ALMOST_INFINITE)
    x = limit if x > limit else x
    x = -limit if x < -limit else x
    return x / (one_like(x) + abs(x))


@register_jitable(**INLINED)
def leaky_relu(x: Any) -> Any:
    """x, or a part of it for negative x."""
    return x if x > 0 else number_like(x, LEAKY_RELU_SLOPE) * x


@register_jitable(**INLINED)
def gelu(x: Any) -> Any:
    """The product of x and F(x), as max(x, 0) - |x| F(-|x|)."""
    magnitude = _limited(x, NORMAL_TAIL_LARGEST)
    _, tail = _normal_density_and_tail(magnitude)
    return relu(x) - magnitude * tail


@register_jitable(**INLINED)
def swish(x: Any) -> Any:
    """The product of x and its sigmoid, as max(x, 0) - |x| sigmoid(-|x|)."""
    one, magnitude = one_like(x), _limited(x, _ALMOST_INFINITE)
    power, p = exponential(-magnitude)
    e = power * p + power
    return relu(x) - magnitude * (e / (one + e))


@register_jitable(**INLINED)
def grad_relu(dy: Any, y: Any) -> Any:
    """The gradient of relu, from its result."""
    return dy if y > 0 else number_like(dy, 0)


@register_jitable(**INLINED)
def grad_relu6(dy: Any, y: Any) -> Any:
    """The gradient of relu6, from its result."""
    return dy if (y > 0) & (y < 6) else number_like(dy, 0)


@register_jitable(**INLINED)
def grad_tanh(dy: Any, y: Any) -> Any:
    """The gradient of tanh, from its result."""
    return dy * (one_like(y) - y * y)


@register_jitable(**INLINED)
def grad_sigmoid(dy: Any, y: Any) -> Any:
    """The gradient of sigmoid, from its result."""
    return dy * y * (one_like(y) - y)


@register_jitable(**INLINED)
def grad_elu(dy: Any, y: Any) -> Any:
    """The gradient of elu, from its result."""
    return dy * (y + one_like(y)) if y < 0 else dy


@register_jitable(**INLINED)
def grad_selu(dy: Any, y: Any) -> Any:
    """The gradient of selu, from its result."""
    return dy * (y + number_like(y, SELU_SCALE_ALPHA) if y < 0 else number_like(y, SELU_SCALE))


@register_jitable(**INLINED)
def grad_softplus(dy: Any, x: Any) -> Any:
    """The gradient of softplus, from its input."""
    return dy * sigmoid(x)


@register_jitable(**INLINED)
def grad_softsign(dy: Any, x: Any) -> Any:
    """The gradient of softsign, from its input."""
    inverse = one_like(x) / (one_like(x) + abs(x))
    return dy * inverse * inverse


@register_jitable(**INLINED)
def grad_leaky_relu(dy: Any, x: Any) -> Any:
    """The gradient of leaky_relu, from its input."""
    return dy if x > 0 else number_like(x, LEAKY_RELU_SLOPE) * dy


@register_jitable(**INLINED)
def grad_gelu(dy: Any, x: Any) -> Any:
    """The gradient of gelu, from its input."""
    magnitude = _limited(x, NORMAL_TAIL_LARGEST)
    density, tail = _normal_density_and_tail(magnitude)
    negative = tail - magnitude * density
    return dy * (negative if x < 0 else one_like(x) - negative)


@register_jitable(**INLINED)
def grad_swish(dy: Any, x: Any) -> Any:
    """The gradient of swish, from its input."""
    one, magnitude = one_like(x), _limited(x, _ALMOST_INFINITE)
    power, p = exponential(-magnitude)
    e = power * p + power
    inverse = one / (one + e)
    tail = e * inverse
    negative = tail - magnitude * (tail * inverse)
    return dy * (negative if x < 0 else one - negative)


@register_jitable(**INLINED)
def _normal_density_and_tail(a: Any) -> Any:
    """e^(-a^2 / 2) / (2 pi)^.5 and F(-a), for 0 <= a."""
    power, p = exponential(number_like(a, -0.5) * (a * a))
    exponential_of_square = power * p + power
    shift = number_like(a, NORMAL_TAIL_SHIFT)
    inverse = one_like(a) / (a + shift)
    return (
        number_like(a, _INVERSE_SQRT_2_PI) * exponential_of_square,
        exponential_of_square * (_polynomial((a - shift) * inverse) * inverse),
    )


@register_jitable(**INLINED)
def _limited(x: Any, limit: Any) -> Any:
    """|x|, but at most the limit."""
    magnitude, largest = abs(x), number_like(x, limit)
    return largest if magnitude > largest else magnitude


def _polynomial(t: Any) -> Any:
    """P of the tail of the normal distribution in `spec`."""
    return _polynomial_float32(t) if isinstance(t, np.float32) else _polynomial_float64(t)


@overload(_polynomial, jit_options=INLINED)
def _overload_polynomial(t: Any) -> Any:
    return _polynomial_float32 if t == types.float32 else _polynomial_float64


def _polynomial_float32(t: Any) -> Any:
    p = np.float32(_FLOAT32[0])
    p = p * t + np.float32(_FLOAT32[1])
    p = p * t + np.float32(_FLOAT32[2])
    p = p * t + np.float32(_FLOAT32[3])
    p = p * t + np.float32(_FLOAT32[4])
    p = p * t + np.float32(_FLOAT32[5])
    p = p * t + np.float32(_FLOAT32[6])
    p = p * t + np.float32(_FLOAT32[7])
    p = p * t + np.float32(_FLOAT32[8])
    return p * t + np.float32(_FLOAT32[9])


def _polynomial_float64(t: Any) -> Any:
    p = _FLOAT64[0]
    p = p * t + _FLOAT64[1]
    p = p * t + _FLOAT64[2]
    p = p * t + _FLOAT64[3]
    p = p * t + _FLOAT64[4]
    p = p * t + _FLOAT64[5]
    p = p * t + _FLOAT64[6]
    p = p * t + _FLOAT64[7]
    p = p * t + _FLOAT64[8]
    p = p * t + _FLOAT64[9]
    p = p * t + _FLOAT64[10]
    p = p * t + _FLOAT64[11]
    p = p * t + _FLOAT64[12]
    p = p * t + _FLOAT64[13]
    p = p * t + _FLOAT64[14]
    p = p * t + _FLOAT64[15]
    p = p * t + _FLOAT64[16]
    p = p * t + _FLOAT64[17]
    p = p * t + _FLOAT64[18]
    p = p * t + _FLOAT64[19]
    p = p * t + _FLOAT64[20]
    return p * t + _FLOAT64[21]


_TAKEN = 1
"""The index of the counter of chunks that were taken."""

_BLOCK_FLOAT32, _BLOCK_FLOAT64 = 4096, 2048
"""The elements of a block: 16 KiB. With smaller ones, copying takes longer."""

RELU, RELU6, TANH, SIGMOID, ELU, SELU, SOFTPLUS, SOFTSIGN, LEAKY_RELU, GELU, SWISH = range(len(NAMES))


def forward_float32(
    activation: Any, kind: Any, x: Any, size: Any, chunk_elements: Any, out: Any, counters: Any
) -> None:
    """Computes an activation function with float32.

    Args:
        activation: The index of its name.
        kind: The kind of elements in x and out; see `spec`.
        x: The bytes of the input.
        size: The number of elements.
        chunk_elements: The elements of a chunk.
        out: The bytes of the result; may be x.
        counters: int64 [2], zeros.
    """
    block = np.empty(_BLOCK_FLOAT32, np.float32)
    chunk = count_up(counters, _TAKEN)
    while chunk * chunk_elements < size:
        end = min((chunk + 1) * chunk_elements, size)
        for first in range(chunk * chunk_elements, end, _BLOCK_FLOAT32):
            count = min(_BLOCK_FLOAT32, end - first)
            _fetch(kind, x, first, count, block)
            _forward(activation, block, count)
            _put(kind, block, first, count, out)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def forward_float64(activation: Any, x: Any, chunk_elements: Any, out: Any, counters: Any) -> None:
    """Computes an activation function with float64.

    Args:
        activation: The index of its name.
        x: The input.
        chunk_elements: The elements of a chunk.
        out: The result; may be x.
        counters: int64 [2], zeros.
    """
    block = np.empty(_BLOCK_FLOAT64, np.float64)
    chunk = count_up(counters, _TAKEN)
    while chunk * chunk_elements < x.size:
        end = min((chunk + 1) * chunk_elements, x.size)
        for first in range(chunk * chunk_elements, end, _BLOCK_FLOAT64):
            count = min(_BLOCK_FLOAT64, end - first)
            _copy(x, first, block, 0, count)
            _forward(activation, block, count)
            _copy(block, 0, out, first, count)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_float32(
    activation: Any, kind: Any, dy: Any, saved: Any, size: Any, chunk_elements: Any, out: Any, counters: Any
) -> None:
    """Computes the gradient of an activation function with float32.

    Args:
        activation: The index of its name.
        kind: The kind of elements in dy, saved and out; see `spec`.
        dy: The bytes of the gradient with respect to the result.
        saved: The bytes of the result or the input.
        size: The number of elements.
        chunk_elements: The elements of a chunk.
        out: The bytes of the gradient with respect to the input; may be dy or saved.
        counters: int64 [2], zeros.
    """
    block, saved_block = np.empty(_BLOCK_FLOAT32, np.float32), np.empty(_BLOCK_FLOAT32, np.float32)
    chunk = count_up(counters, _TAKEN)
    while chunk * chunk_elements < size:
        end = min((chunk + 1) * chunk_elements, size)
        for first in range(chunk * chunk_elements, end, _BLOCK_FLOAT32):
            count = min(_BLOCK_FLOAT32, end - first)
            _fetch(kind, dy, first, count, block)
            _fetch(kind, saved, first, count, saved_block)
            _gradient(activation, block, saved_block, count)
            _put(kind, block, first, count, out)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_float64(activation: Any, dy: Any, saved: Any, chunk_elements: Any, out: Any, counters: Any) -> None:
    """Computes the gradient of an activation function with float64.

    Args:
        activation: The index of its name.
        dy: The gradient with respect to the result.
        saved: The result or the input.
        chunk_elements: The elements of a chunk.
        out: The gradient with respect to the input; may be dy or saved.
        counters: int64 [2], zeros.
    """
    block, saved_block = np.empty(_BLOCK_FLOAT64, np.float64), np.empty(_BLOCK_FLOAT64, np.float64)
    chunk = count_up(counters, _TAKEN)
    while chunk * chunk_elements < dy.size:
        end = min((chunk + 1) * chunk_elements, dy.size)
        for first in range(chunk * chunk_elements, end, _BLOCK_FLOAT64):
            count = min(_BLOCK_FLOAT64, end - first)
            _copy(dy, first, block, 0, count)
            _copy(saved, first, saved_block, 0, count)
            _gradient(activation, block, saved_block, count)
            _copy(block, 0, out, first, count)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable
def _fetch(kind: Any, source: Any, first: Any, count: Any, block: Any) -> None:
    if kind == FLOAT16_ELEMENTS:
        _copy(source.view(np.int16), first, block, 0, count)
    elif kind == BFLOAT16_ELEMENTS:
        _copy(source.view(np.uint16), first, block, 0, count)
    else:
        _copy(source.view(np.float32), first, block, 0, count)


@register_jitable
def _put(kind: Any, block: Any, first: Any, count: Any, target: Any) -> None:
    if kind == FLOAT16_ELEMENTS:
        _copy(block, 0, target.view(np.int16), first, count)
    elif kind == BFLOAT16_ELEMENTS:
        _copy(block, 0, target.view(np.uint16), first, count)
    else:
        _copy(block, 0, target.view(np.float32), first, count)


@register_jitable
def _copy(source: Any, source_first: Any, target: Any, target_first: Any, count: Any) -> None:
    for index in range(count):
        write(target, target_first + index, read(source, source_first + index))


@register_jitable(fastmath={"contract"})
def _forward(activation: Any, block: Any, count: Any) -> None:
    if activation == RELU:
        for index in range(count):
            write(block, index, relu(read(block, index)))
    elif activation == RELU6:
        for index in range(count):
            write(block, index, relu6(read(block, index)))
    elif activation == TANH:
        for index in range(count):
            write(block, index, hyperbolic_tangent(read(block, index)))
    elif activation == SIGMOID:
        for index in range(count):
            write(block, index, sigmoid(read(block, index)))
    elif activation == ELU:
        for index in range(count):
            write(block, index, elu(read(block, index)))
    elif activation == SELU:
        for index in range(count):
            write(block, index, selu(read(block, index)))
    elif activation == SOFTPLUS:
        for index in range(count):
            write(block, index, softplus(read(block, index)))
    elif activation == SOFTSIGN:
        for index in range(count):
            write(block, index, softsign(read(block, index)))
    elif activation == LEAKY_RELU:
        for index in range(count):
            write(block, index, leaky_relu(read(block, index)))
    elif activation == GELU:
        for index in range(count):
            write(block, index, gelu(read(block, index)))
    elif activation == SWISH:
        for index in range(count):
            write(block, index, swish(read(block, index)))


@register_jitable(fastmath={"contract"})
def _gradient(activation: Any, block: Any, saved: Any, count: Any) -> None:
    if activation == RELU:
        for index in range(count):
            write(block, index, grad_relu(read(block, index), read(saved, index)))
    elif activation == RELU6:
        for index in range(count):
            write(block, index, grad_relu6(read(block, index), read(saved, index)))
    elif activation == TANH:
        for index in range(count):
            write(block, index, grad_tanh(read(block, index), read(saved, index)))
    elif activation == SIGMOID:
        for index in range(count):
            write(block, index, grad_sigmoid(read(block, index), read(saved, index)))
    elif activation == ELU:
        for index in range(count):
            write(block, index, grad_elu(read(block, index), read(saved, index)))
    elif activation == SELU:
        for index in range(count):
            write(block, index, grad_selu(read(block, index), read(saved, index)))
    elif activation == SOFTPLUS:
        for index in range(count):
            write(block, index, grad_softplus(read(block, index), read(saved, index)))
    elif activation == SOFTSIGN:
        for index in range(count):
            write(block, index, grad_softsign(read(block, index), read(saved, index)))
    elif activation == LEAKY_RELU:
        for index in range(count):
            write(block, index, grad_leaky_relu(read(block, index), read(saved, index)))
    elif activation == GELU:
        for index in range(count):
            write(block, index, grad_gelu(read(block, index), read(saved, index)))
    elif activation == SWISH:
        for index in range(count):
            write(block, index, grad_swish(read(block, index), read(saved, index)))
