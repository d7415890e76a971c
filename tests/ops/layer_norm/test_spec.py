"""What LayerNorm and LayerNormGrad refuse, and what they take."""

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    Plan,
    plan_forward,
    plan_gradient,
)

Inputs = ForwardInputs | GradInputs
BFLOAT16 = ml_dtypes.bfloat16


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


FORWARD = ForwardInputs(zeros(2, 3, 4, 5), zeros(4, 5), zeros(4, 5))
GRADIENT = GradInputs(zeros(2, 3, 4, 5), zeros(2, 3, 4, 5), zeros(4, 5), zeros(2, 3), zeros(2, 3))

for_both = pytest.mark.parametrize("good", [FORWARD, GRADIENT], ids=["forward", "gradient"])


def plan(inputs: Inputs, epsilon: float = 1e-5) -> Plan:
    if isinstance(inputs, GradInputs):
        return plan_gradient(inputs, GradAttributes())
    return plan_forward(inputs, ForwardAttributes(epsilon))


def refusal_of(inputs: Inputs, epsilon: float = 1e-5) -> tuple[str | None, str]:
    with pytest.raises(InvalidArgumentError) as raised:
        plan(inputs, epsilon)
    return raised.value.field, raised.value.message


@pytest.mark.parametrize("epsilon", [-1.0, -1e-300, math.nan, math.inf, -math.inf])
def test_epsilon(epsilon: float) -> None:
    message = f"expected a finite epsilon of at least 0, got {epsilon}"
    assert refusal_of(FORWARD, epsilon) == ("epsilon", message)


@for_both
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.uint16])
def test_dtype_of_x(good: Inputs, dtype: Any) -> None:
    message = f"expected x of float16, bfloat16, float32 or float64, got {np.dtype(dtype)}"
    assert refusal_of(replace(good, x=good.x.astype(dtype))) == ("x", message)


@pytest.mark.parametrize(
    ("good", "name"),
    [(FORWARD, "scale"), (FORWARD, "offset"), (GRADIENT, "scale"), (GRADIENT, "mean"), (GRADIENT, "rstd")],
)
@pytest.mark.parametrize(
    ("x_dtype", "given", "expected"),
    [
        (np.float32, np.float64, "float32"),
        (np.float64, np.float32, "float64"),
        (np.float16, np.float16, "float32"),
        (BFLOAT16, BFLOAT16, "float32"),
        (np.float32, np.int64, "float32"),
    ],
)
def test_dtypes_of_parameters(good: Inputs, name: str, x_dtype: Any, given: Any, expected: str) -> None:
    arrays = {
        each: array.astype(x_dtype if each in ("x", "y_backprop") else expected) for each, array in vars(good).items()
    }
    inputs: Inputs = type(good)(**arrays | {name: arrays[name].astype(given)})
    message = f"expected {name} of {expected} for x of {np.dtype(x_dtype)}, got {np.dtype(given)}"
    assert refusal_of(inputs) == (name, message)


def test_dtype_of_y_backprop() -> None:
    message = "expected y_backprop of float32 for x of float32, got bfloat16"
    assert refusal_of(replace(GRADIENT, y_backprop=zeros(2, 3, 4, 5, dtype=BFLOAT16))) == ("y_backprop", message)


@for_both
@pytest.mark.parametrize("shape", [(5, 4), (4,), (3, 4, 6), (1, 2, 3, 4, 5), (0,), (2, 3)])
def test_x_ends_with_the_shape_of_scale(good: Inputs, shape: tuple[int, ...]) -> None:
    shown = ",".join(map(str, shape))
    message = f"expected scale of a shape that the shape of x, [2,3,4,5], ends with, got [{shown}]"
    assert refusal_of(replace(good, scale=zeros(*shape))) == ("scale", message)


@for_both
def test_scale_has_a_dimension(good: Inputs) -> None:
    message = "expected scale with at least one dimension, got shape []"
    assert refusal_of(replace(good, scale=zeros())) == ("scale", message)
    assert refusal_of(replace(good, x=zeros(), scale=zeros())) == ("scale", message)


@pytest.mark.parametrize(
    ("good", "name", "shape", "expected"),
    [
        (FORWARD, "offset", (5,), "[4,5], that of scale"),
        (FORWARD, "offset", (), "[4,5], that of scale"),
        (GRADIENT, "y_backprop", (2, 3, 5, 4), "[2,3,4,5], that of x"),
        (GRADIENT, "mean", (2, 3, 1, 1), "[2,3], that of x without the dimensions of scale"),
        (GRADIENT, "mean", (6,), "[2,3], that of x without the dimensions of scale"),
        (GRADIENT, "rstd", (), "[2,3], that of x without the dimensions of scale"),
    ],
)
def test_shapes(good: Inputs, name: str, shape: tuple[int, ...], expected: str) -> None:
    shown = ",".join(map(str, shape))
    message = f"expected {name} of shape {expected}, got [{shown}]"
    inputs: Inputs = type(good)(**vars(good) | {name: zeros(*shape)})
    assert refusal_of(inputs) == (name, message)


@for_both
def test_dtypes_come_before_shapes(good: Inputs) -> None:
    assert refusal_of(replace(good, x=zeros(dtype=np.int32), scale=zeros()))[0] == "x"
    assert refusal_of(replace(good, scale=zeros(3, dtype=np.int32)))[1].endswith("got int32")


class TestTaken:
    @pytest.mark.parametrize(
        ("x_shape", "scale_shape"),
        [((5,), (5,)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((2, 3), (2, 3)), ((0, 4), (4,)), ((2, 0), (0,))],
    )
    @pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
    def test_shapes_and_dtypes(self, dtype: Any, x_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
        param = np.float64 if dtype == np.float64 else np.float32
        stats_shape = x_shape[: len(x_shape) - len(scale_shape)]
        x, scale, stats = zeros(*x_shape, dtype=dtype), *(zeros(*s, dtype=param) for s in (scale_shape, stats_shape))
        planned = plan(ForwardInputs(x, scale, scale), epsilon=0.0)
        assert (planned.geometry.stats_shape, planned.geometry.size) == (stats_shape, scale.size)
        assert planned.geometry.shape == (stats.size, scale.size)
        wanted = [(dtype, x_shape), (param, stats_shape), (param, stats_shape)]
        assert [(s.dtype, s.shape) for s in planned.output_specs] == wanted
        planned = plan(GradInputs(x, x, scale, stats, stats))
        wanted = [(dtype, x_shape), (param, scale_shape), (param, scale_shape)]
        assert [(s.dtype, s.shape) for s in planned.output_specs] == wanted
