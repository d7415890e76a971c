"""sigmoid, tanh and the functions they need, for Numba's loops: arithmetic that LLVM can vectorise.

Numba calls the C library for an exponential, one element at a time. Here, for t <= 0, e^t is 2^k (1 + p), with k the
integer nearest to t / ln 2, and p = e^s - 1 for s = t - k ln 2. As |s| <= ln 2 / 2, p needs few terms of its Taylor
series: the rest is smaller than the rounding. No function overflows, or loses digits near 0.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from gradserve_server.devices.host.intrinsics import intrinsic

INLINED: Any = {"fastmath": {"contract"}, "forceinline": True}
"""Inlined by LLVM, which takes less time than by Numba."""

_LEAST_FLOAT32, _LEAST_FLOAT64 = np.float32(-87), -708.0
"""The least t for which 2^k is not subnormal. Below, 2^k counts as 0."""


@register_jitable(**INLINED)
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    one = one_like(x)
    power, p = exponential(-abs(x))
    e = power * p + power
    return (one if x >= 0 else e) / (one + e)


@register_jitable(**INLINED)
def hyperbolic_tangent(x: Any) -> Any:
    """(1 - e^-2x) / (1 + e^-2x)."""
    one = one_like(x)
    e_minus_1 = exponential_minus_1(-(abs(x) + abs(x)))
    magnitude = e_minus_1 / (one + one + e_minus_1)
    return magnitude if x < 0 else -magnitude


@register_jitable(**INLINED)
def exponential_minus_1(t: Any) -> Any:
    """e^t - 1 for t <= 0."""
    power, p = exponential(t)
    return power * p + (power - one_like(t))


@register_jitable(**INLINED)
def log_of_1_plus(e: Any) -> Any:
    """log(1 + e) for 0 <= e <= 1: with s = e / (2 + e) it is 2 artanh(s) = 2 s (1 + s^2 (1/3 + s^2 / 5 + ...))."""
    one = one_like(e)
    s = e / (one + one + e)
    square = s * s
    return (s + s) * (square * artanh_series(square) + one)


@intrinsic
def number_like(typing_context: Any, x: Any, number: Any) -> Any:
    """A number in the dtype of x, because with a float32, compiled code treats a plain number as float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], number, x)

    return x(x, number), generate


@register_jitable(**INLINED)
def one_like(x: Any) -> Any:
    """1 in the dtype of x."""
    return number_like(x, 1)


def artanh_series(square: Any) -> Any:
    """1/3 + v / 5 + v^2 / 7 + ... for 0 <= v <= 1/9, by Chebyshev interpolations with few terms."""
    return _artanh_series_float32(square) if isinstance(square, np.float32) else _artanh_series_float64(square)


def exponential(t: Any) -> Any:
    """2^k and p for a float32 or float64 t <= 0. A subnormal 2^k becomes 0. For NaN, p is NaN."""
    return _float32(t) if isinstance(t, np.float32) else _float64(t)


@overload(artanh_series, jit_options=INLINED)
def _artanh_series(square: Any) -> Any:
    return _artanh_series_float32 if square == types.float32 else _artanh_series_float64


@overload(exponential, jit_options=INLINED)
def _exponential(t: Any) -> Any:
    return _float32 if t == types.float32 else _float64


def _artanh_series_float32(square: Any) -> Any:
    p = np.float32(0.13425749011441238)
    p = p * square + np.float32(0.1411830990265085)
    p = p * square + np.float32(0.20003780322455844)
    return p * square + np.float32(0.33333320168349617)


def _artanh_series_float64(square: Any) -> Any:
    p = 0.08082022806009813
    p = p * square + 0.04400369243052285
    p = p * square + 0.06000536404799805
    p = p * square + 0.06657072104826929
    p = p * square + 0.0769278503247935
    p = p * square + 0.09090894718066428
    p = p * square + 0.11111111358713932
    p = p * square + 0.1428571428355438
    p = p * square + 0.20000000000007292
    return p * square + 0.3333333333333333


def _float32(t: Any) -> Any:
    rounder = np.float32(1.5 * 2**23)
    is_nothing = t < _LEAST_FLOAT32
    t = _LEAST_FLOAT32 if is_nothing else t
    # The sum has no fraction, and k in its last bits.
    rounded = np.float32(t * np.float32(1.4426950408889634) + rounder)
    k = rounded - rounder
    s = (t - k * np.float32(0.693359375)) - k * np.float32(-2.1219444005469057e-4)
    power = np.int32((rounded.view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    power = np.float32(0) if is_nothing else power
    p = np.float32(1 / 5040)
    p = p * s + np.float32(1 / 720)
    p = p * s + np.float32(1 / 120)
    p = p * s + np.float32(1 / 24)
    p = p * s + np.float32(1 / 6)
    p = p * s + np.float32(1 / 2)
    return power, p * (s * s) + s


def _float64(t: Any) -> Any:
    rounder = 1.5 * 2**52
    is_nothing = t < _LEAST_FLOAT64
    t = _LEAST_FLOAT64 if is_nothing else t
    rounded = np.float64(t * 1.4426950408889634 + rounder)
    k = rounded - rounder
    s = (t - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    power = np.int64((rounded.view(np.int64) + 1023) << 52).view(np.float64)
    power = np.float64(0) if is_nothing else power
    p = 1 / 6227020800
    p = p * s + 1 / 479001600
    p = p * s + 1 / 39916800
    p = p * s + 1 / 3628800
    p = p * s + 1 / 362880
    p = p * s + 1 / 40320
    p = p * s + 1 / 5040
    p = p * s + 1 / 720
    p = p * s + 1 / 120
    p = p * s + 1 / 24
    p = p * s + 1 / 6
    p = p * s + 1 / 2
    return power, p * (s * s) + s
