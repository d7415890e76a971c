"""Activation functions: which there are, and what they give beside their definitions."""

import re
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.activation.reference import activation, activation_grad
from gradserve_server.ops.activation.spec import NAMES, check_activation, gradient_of_result
from tests.golden.activation import INPUTS, load_recorded
from tests.ops.activation.cases import DTYPES, assert_forward, assert_gradient, saved_for_gradient, values

by_name = pytest.mark.parametrize("name", NAMES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_name
def test_every_name_is_known(name: str) -> None:
    check_activation(name)


@pytest.mark.parametrize("name", ["", "Relu", "softmax", "relu "])
def test_other_names_are_refused_with_a_list_of_those_known(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f'"swish", got "{name}"')) as raised:
        check_activation(name)
    assert raised.value.field == "activation_fn"
    assert all(f'"{known}"' in raised.value.message for known in NAMES)


def test_gradients_that_need_the_input() -> None:
    assert [name for name in NAMES if not gradient_of_result(name)] == [
        *("softplus", "softsign", "leaky_relu", "gelu", "swish"),
    ]


@by_dtype
@by_name
def test_forward_by_the_definition(name: str, dtype: np.dtype[Any]) -> None:
    x = values(dtype)
    with np.errstate(over="ignore"):  # the result itself, of selu and of gradients of what is largest
        assert_forward(name, x, activation(np, name, x))


@by_dtype
@by_name
def test_gradient_by_the_definition(name: str, dtype: np.dtype[Any]) -> None:
    x = values(dtype)
    dy = np.random.default_rng(0).normal(0, 1, x.shape).astype(np.float32).astype(dtype)
    saved = saved_for_gradient(name, x)
    assert_gradient(name, dy, saved, activation_grad(np, name, dy, saved))


@by_name
def test_beside_tensorflow(name: str) -> None:
    """In float64, TensorFlow has the constants of two functions as float32."""
    tolerance = 2e-8 if name in ("gelu", "leaky_relu") else 2e-15
    results, gradients = load_recorded()[name]
    y = activation(np, name, INPUTS)
    np.testing.assert_allclose(y, results, rtol=tolerance, atol=tolerance)
    saved = y if gradient_of_result(name) else INPUTS
    slopes = activation_grad(np, name, np.ones_like(INPUTS), saved)
    np.testing.assert_allclose(slopes, gradients, rtol=tolerance, atol=tolerance)


def test_all_are_recorded() -> None:
    assert set(load_recorded()) == set(NAMES)


@by_name
def test_nothing_is_warned_of(name: str) -> None:
    """Warnings of NumPy are errors in tests."""
    x = np.array([-np.inf, -1e30, -1000, -0.0, 0, 1000, 1e30, np.inf, np.nan], np.float32)
    y = activation(np, name, x)
    activation_grad(np, name, np.ones_like(x), y if gradient_of_result(name) else x)


@by_name
def test_gradient_beside_differences(name: str) -> None:
    x = np.array([-7.0, -3.1, -1.27, -0.4, -1e-3, 1e-3, 0.3, 1.5, 4.9, 5.9, 6.1, 12.0])
    step = 1e-5
    slope = (activation(np, name, x + step) - activation(np, name, x - step)) / (2 * step)
    saved = activation(np, name, x) if gradient_of_result(name) else x
    np.testing.assert_allclose(activation_grad(np, name, np.full_like(x, 3), saved), 3 * slope, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "saved", "slope"),
    [
        ("relu", 0, 0),
        ("relu6", 0, 0),
        ("relu6", 6, 0),
        ("elu", 0, 1),
        ("selu", 0, 1.0507009873554805),
        ("leaky_relu", 0, 0.2),
        ("leaky_relu", -0.0, 0.2),
    ],
)
def test_gradient_at_kinks(name: str, saved: float, slope: float) -> None:
    assert activation_grad(np, name, np.ones(1), np.array([saved]))[0] == slope
