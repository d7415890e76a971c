"""The mathematics of activation functions, over NumPy or CuPy.

The kernels are compared with it; the definitions are in `spec`. Arrays of 16 bits are computed in float32, others in
their dtype, and the result is rounded to the dtype at the end. Nothing overflows unless a result does, and no digits
are lost near 0 or in tails.
"""

from collections.abc import Callable
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.activation.spec import (
    LEAKY_RELU_SLOPE,
    NORMAL_TAIL_FLOAT64,
    NORMAL_TAIL_LARGEST,
    NORMAL_TAIL_SHIFT,
    SELU_SCALE,
    SELU_SCALE_ALPHA,
)
from gradserve_server.tensors.spec import widened

_INVERSE_SQRT_2_PI = 0.3989422804014327
_ALMOST_INFINITE = 1e30
"""A float32 to which adding 1 makes no difference."""


def activation(xp: Any, name: str, x: Array) -> Array:
    """Returns the result of an activation function, in the dtype of x."""
    return _FORWARD[name](xp, x.astype(widened(x.dtype))).astype(x.dtype)


def activation_grad(xp: Any, name: str, dy: Array, saved: Array) -> Array:
    """Returns the gradient with respect to the input, in the dtype of dy.

    Args:
        xp: NumPy or CuPy.
        name: The name of the activation function.
        dy: The gradient with respect to the result.
        saved: The result if `gradient_of_result(name)`, otherwise the input.
    """
    dtype = widened(dy.dtype)
    return _GRADIENT[name](xp, dy.astype(dtype), saved.astype(dtype)).astype(dy.dtype)


def _relu(xp: Any, x: Array) -> Array:
    return xp.maximum(x, 0)


def _relu6(xp: Any, x: Array) -> Array:
    return xp.minimum(xp.maximum(x, 0), 6)


def _tanh(xp: Any, x: Array) -> Array:
    return xp.tanh(x)


def sigmoid(xp: Any, x: Array) -> Array:
    """1 / (1 + e^-x), without overflow, and with all digits near 0."""
    exponential = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, exponential) / (1 + exponential)


def _elu(xp: Any, x: Array) -> Array:
    return xp.where(x < 0, xp.expm1(xp.minimum(x, 0)), x)


def _selu(xp: Any, x: Array) -> Array:
    return xp.where(x < 0, SELU_SCALE_ALPHA * xp.expm1(xp.minimum(x, 0)), SELU_SCALE * x)


def _softplus(xp: Any, x: Array) -> Array:
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


def _softsign(xp: Any, x: Array) -> Array:
    x = xp.clip(x, -_ALMOST_INFINITE, _ALMOST_INFINITE)
    return x / (1 + xp.abs(x))


def _leaky_relu(xp: Any, x: Array) -> Array:
    return xp.where(x > 0, x, LEAKY_RELU_SLOPE * x)


def _gelu(xp: Any, x: Array) -> Array:
    """Computes max(x, 0) - |x| F(-|x|)."""
    magnitude = xp.minimum(xp.abs(x), NORMAL_TAIL_LARGEST)
    _, tail = _normal_density_and_tail(xp, magnitude)
    return xp.maximum(x, 0) - magnitude * tail


def _swish(xp: Any, x: Array) -> Array:
    """Computes max(x, 0) - |x| s(-|x|)."""
    magnitude = xp.minimum(xp.abs(x), _ALMOST_INFINITE)
    return xp.maximum(x, 0) - magnitude * sigmoid(xp, -magnitude)


def _grad_relu(xp: Any, dy: Array, y: Array) -> Array:
    return xp.where(y > 0, dy, 0)


def _grad_relu6(xp: Any, dy: Array, y: Array) -> Array:
    return xp.where((y > 0) & (y < 6), dy, 0)


def _grad_tanh(xp: Any, dy: Array, y: Array) -> Array:
    return dy * (1 - y * y)


def _grad_sigmoid(xp: Any, dy: Array, y: Array) -> Array:
    return dy * y * (1 - y)


def _grad_elu(xp: Any, dy: Array, y: Array) -> Array:
    return xp.where(y < 0, dy * (y + 1), dy)


def _grad_selu(xp: Any, dy: Array, y: Array) -> Array:
    return dy * xp.where(y < 0, y + SELU_SCALE_ALPHA, SELU_SCALE)


def _grad_softplus(xp: Any, dy: Array, x: Array) -> Array:
    return dy * sigmoid(xp, x)


def _grad_softsign(xp: Any, dy: Array, x: Array) -> Array:
    inverse = 1 / (1 + xp.abs(x))
    return dy * inverse * inverse


def _grad_leaky_relu(xp: Any, dy: Array, x: Array) -> Array:
    return xp.where(x > 0, dy, LEAKY_RELU_SLOPE * dy)


def _grad_gelu(xp: Any, dy: Array, x: Array) -> Array:
    magnitude = xp.minimum(xp.abs(x), NORMAL_TAIL_LARGEST)
    density, tail = _normal_density_and_tail(xp, magnitude)
    change = magnitude * density
    return dy * xp.where(x < 0, tail - change, 1 - tail + change)


def _grad_swish(xp: Any, dy: Array, x: Array) -> Array:
    magnitude = xp.minimum(xp.abs(x), _ALMOST_INFINITE)
    tail = sigmoid(xp, -magnitude)
    change = magnitude * tail * (1 - tail)
    return dy * xp.where(x < 0, tail - change, 1 - tail + change)


def _normal_density_and_tail(xp: Any, a: Array) -> tuple[Array, Array]:
    """e^(-a^2 / 2) / (2 pi)^.5 and F(-a), for a >= 0."""
    inverse = 1 / (a + NORMAL_TAIL_SHIFT)
    t = (a - NORMAL_TAIL_SHIFT) * inverse
    p = xp.full_like(t, NORMAL_TAIL_FLOAT64[0])
    for coefficient in NORMAL_TAIL_FLOAT64[1:]:
        p = p * t + coefficient
    exponential = xp.exp(-0.5 * a * a)
    return _INVERSE_SQRT_2_PI * exponential, exponential * p * inverse


_FORWARD: dict[str, Callable[[Any, Array], Array]] = {
    "relu": _relu,
    "relu6": _relu6,
    "tanh": _tanh,
    "sigmoid": sigmoid,
    "elu": _elu,
    "selu": _selu,
    "softplus": _softplus,
    "softsign": _softsign,
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "swish": _swish,
}
_GRADIENT: dict[str, Callable[[Any, Array, Array], Array]] = {
    "relu": _grad_relu,
    "relu6": _grad_relu6,
    "tanh": _grad_tanh,
    "sigmoid": _grad_sigmoid,
    "elu": _grad_elu,
    "selu": _grad_selu,
    "softplus": _grad_softplus,
    "softsign": _grad_softsign,
    "leaky_relu": _grad_leaky_relu,
    "gelu": _grad_gelu,
    "swish": _grad_swish,
}
