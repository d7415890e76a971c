"""The loops of activation functions on the host. See `kernels`.

Each block of elements is copied and widened to the kernel's own memory, computed there, and rounded and copied to its
place. So results may replace inputs without special loops, and the functions are compiled for float32 and float64
only. A block stays in the first-level cache.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, sigmoid
from gradserve_server.devices.host.intrinsics import DONE, count_up, read, write
from gradserve_server.ops.activation.cpu.element_kinds import BFLOAT16_ELEMENTS, FLOAT16_ELEMENTS
from gradserve_server.ops.activation.cpu.functions import (
    elu,
    gelu,
    grad_elu,
    grad_gelu,
    grad_leaky_relu,
    grad_relu,
    grad_relu6,
    grad_selu,
    grad_sigmoid,
    grad_softplus,
    grad_softsign,
    grad_swish,
    grad_tanh,
    leaky_relu,
    relu,
    relu6,
    selu,
    softplus,
    softsign,
    swish,
)
from gradserve_server.ops.activation.spec import NAMES

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
        kind: The kind of elements in x and out; see `element_kinds`.
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
        kind: The kind of elements in dy, saved and out; see `element_kinds`.
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
