"""Activation functions of one element, and their gradients, for Numba's loops.

They are branch-free, so that LLVM vectorises them. The definitions are in `spec`, and the formulas in `reference`.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from gradserve_server.devices.host.activations import (
    INLINED,
    exponential,
    exponential_minus_1,
    log_of_1_plus,
    number_like,
    one_like,
    sigmoid,
)
from gradserve_server.ops.activation import normal_tail
from gradserve_server.ops.activation.spec import LEAKY_RELU_SLOPE, SELU_SCALE, SELU_SCALE_ALPHA

_INVERSE_SQRT_2_PI = 0.3989422804014327
_ALMOST_INFINITE = 1e30
_FLOAT32, _FLOAT64 = normal_tail.FLOAT32, normal_tail.FLOAT64


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
    magnitude = _limited(x, normal_tail.LARGEST)
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
    magnitude = _limited(x, normal_tail.LARGEST)
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
    shift = number_like(a, normal_tail.SHIFT)
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
    """P in `normal_tail`."""
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
