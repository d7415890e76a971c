"""Inputs for activation functions, what they should give by their definitions, and how near results must be."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.activation.spec import gradient_of_result
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

DTYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)

EDGES = (
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    1e-8,
    -1e-8,
    5.99,
    6.0,
    6.01,
    87.0,
    -87.0,
    89.0,
    -89.0,
    708.0,
    -708.0,
    1000.0,
    -1000.0,
)
NOT_FINITE = (math.inf, -math.inf, math.nan)

_RELATIVE_ERRORS = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8, FLOAT32: 2.0**-22, FLOAT64: 2.0**-50}
_ABSOLUTE_ERRORS = {FLOAT16: 2.0**-25, BFLOAT16: 2e-36, FLOAT32: 2e-36, FLOAT64: 1e-304}
"""What is near the least normal number counts as 0; float16 has subnormal numbers."""

_LARGE_DIFFERENCES = ("tanh", "selu", "gelu", "swish")
"""The gradients that are small differences of large numbers: errors are relative to those."""


def values(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns inputs: edges, largest numbers, and those between."""
    largest = {FLOAT16: 65504.0, FLOAT64: 1e308}.get(dtype, 3e38)
    tiny = np.geomspace(1e-30, 1, 61)
    wide = np.concatenate([EDGES, [largest, -largest], np.linspace(-12, 12, 2401), tiny, -tiny])
    with np.errstate(over="ignore"):
        return np.concatenate([wide.astype(np.float32 if dtype.itemsize == 2 else dtype), NOT_FINITE]).astype(dtype)


def formula(name: str, x: float) -> float:
    """The definition of a function, in a form that is right everywhere."""
    if math.isnan(x):
        return x
    return _FORMULAS[name](x)


def derivative(name: str, saved: float) -> float:
    """The derivative, from the result or the input, as `gradient_of_result` says."""
    if math.isnan(saved):
        return _DERIVATIVES_AT_NAN.get(name, saved)
    return _DERIVATIVES[name](saved)


def expected_forward(name: str, x: NDArray[Any]) -> NDArray[np.float64]:
    return np.array([formula(name, float(each)) for each in x.ravel()]).reshape(x.shape)


def saved_for_gradient(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """Returns what `gradient` takes: x, or the result rounded to the dtype of x."""
    if not gradient_of_result(name):
        return x
    with np.errstate(over="ignore"):
        return expected_forward(name, x).astype(np.float32 if x.dtype.itemsize == 2 else x.dtype).astype(x.dtype)


def expected_gradient(name: str, dy: NDArray[Any], saved: NDArray[Any]) -> NDArray[np.float64]:
    derivatives = [derivative(name, float(each)) for each in saved.ravel()]
    expected: NDArray[np.float64] = dy.astype(np.float64) * np.array(derivatives).reshape(dy.shape)
    return expected


def assert_forward(name: str, x: NDArray[Any], actual: NDArray[Any]) -> None:
    """Compares a result with the definition, to some units in the last place."""
    wanted = expected_forward(name, x)
    squares = np.clip(x.astype(np.float64), -40, 0) ** 2 if name == "gelu" else 0
    # e^(-x^2 / 2) has the rounding error of x^2, times x^2 / 2.
    _assert_near(actual, wanted, x.dtype, scale=np.abs(wanted) * (1 + squares))


def assert_gradient(name: str, dy: NDArray[Any], saved: NDArray[Any], actual: NDArray[Any]) -> None:
    """Compares a gradient with the definition, to some units in the last place."""
    wanted = expected_gradient(name, dy, saved)
    scale = np.abs(wanted)
    if name in _LARGE_DIFFERENCES:
        scale = scale + 2 * np.abs(dy.astype(np.float64))
    _assert_near(actual, wanted, dy.dtype, scale)


def _assert_near(
    actual: NDArray[Any], wanted: NDArray[np.float64], dtype: np.dtype[Any], scale: NDArray[np.float64]
) -> None:
    assert (actual.dtype, actual.shape) == (dtype, wanted.shape)
    with np.errstate(all="ignore"):
        rounded = wanted.astype(np.float32 if dtype.itemsize == 2 else dtype).astype(dtype).astype(np.float64)
        errors = np.abs(actual.astype(np.float64) - wanted)
        arithmetic = _RELATIVE_ERRORS[dtype if dtype.itemsize > 2 else FLOAT32] * scale
        allowed = arithmetic + _RELATIVE_ERRORS[dtype] * np.abs(wanted) + _ABSOLUTE_ERRORS[dtype]
        near = errors <= allowed
    same = (actual.astype(np.float64) == rounded) | (np.isnan(actual.astype(np.float64)) & np.isnan(wanted))
    # Where the rounded number is infinite there is nothing near it.
    wrong = np.flatnonzero(~(same | (near & np.isfinite(rounded))))
    assert not wrong.size, [(actual.flat[each], wanted.flat[each]) for each in wrong[:5]]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _if_finite(function: Callable[[float], float], below: float, above: float) -> Callable[[float], float]:
    """A function with its limits."""
    return lambda x: function(x) if math.isfinite(x) else above if x > 0 else below


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717

_FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "selu": lambda x: _SELU_SCALE * (x if x > 0 else _SELU_ALPHA * math.expm1(x)),
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "softsign": _if_finite(lambda x: x / (1 + abs(x)), -1, 1),
    "leaky_relu": lambda x: max(x, 0.2 * x),
    "gelu": _if_finite(lambda x: x * _normal(x), 0, math.inf),
    "swish": _if_finite(lambda x: x * _sigmoid(x), 0, math.inf),
}
_DERIVATIVES: dict[str, Callable[[float], float]] = {
    "relu": lambda y: float(y > 0),
    "relu6": lambda y: float(0 < y < 6),
    "tanh": lambda y: (1 - y) * (1 + y),
    "sigmoid": lambda y: y * (1 - y),
    "elu": lambda y: y + 1 if y < 0 else 1.0,
    "selu": lambda y: y + _SELU_SCALE * _SELU_ALPHA if y < 0 else _SELU_SCALE,
    "softplus": _sigmoid,
    "softsign": lambda x: (1 / (1 + abs(x))) ** 2,
    "leaky_relu": lambda x: 1.0 if x > 0 else 0.2,
    "gelu": _if_finite(lambda x: _normal(x) + x * _density(x), 0, 1),
    "swish": _if_finite(lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x)), 0, 1),
}
_DERIVATIVES_AT_NAN = {"relu": 0.0, "relu6": 0.0, "elu": 1.0, "selu": _SELU_SCALE, "leaky_relu": 0.2}
"""Of those that only compare with 0; as TensorFlow's."""
