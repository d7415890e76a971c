"""Inputs for batch normalization, and how near to the reference its results must be."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.batch_norm import reference
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    plan_forward,
    plan_gradient,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

Put = Callable[[NDArray[Any]], Any]
"""Puts an array where the kernels are."""

ROUNDING = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8, FLOAT32: 0.0, FLOAT64: 0.0}
"""How far an element of T may be from the number that it stands for, relative to it."""
ACCURACY = {FLOAT32: 1e-5, FLOAT64: 1e-13}
"""Of results before they are rounded to T, relative to the largest; by U."""

EPSILON = 1e-3


@dataclass(frozen=True)
class Case:
    """What x is like."""

    shape: tuple[int, ...]
    data_format: str
    mean: float = 0.5

    def __str__(self) -> str:
        return f"{self.data_format}-{'x'.join(map(str, self.shape))}" + (f"-mean{self.mean:g}" * (self.mean != 0.5))

    @property
    def channels(self) -> int:
        return self.shape[-1 if self.data_format.endswith("C") else 1]


CASES = (
    Case((4, 14, 14, 64), "NHWC"),
    Case((4, 64, 14, 14), "NCHW"),
    Case((2, 7, 5, 1), "NHWC"),
    Case((2, 1, 7, 5), "NCHW"),
    Case((3, 4, 4, 1), "NHWC"),
    Case((3, 7, 5, 3), "NHWC"),
    Case((3, 3, 7, 5), "NCHW"),
    Case((1, 1, 1, 5), "NHWC"),
    Case((1, 40, 1, 1), "NCHW"),
    Case((2, 1, 2, 1000), "NHWC"),
    Case((3, 130, 2, 2), "NCHW"),
    Case((2, 300, 1, 3), "NCHW"),
    Case((5, 9, 11, 56), "NHWC"),
    Case((2, 3, 2, 5, 24), "NDHWC"),
    Case((2, 12, 3, 4, 8), "NCDHW"),
    Case((2, 3, 3, 3, 3), "NCDHW"),
    Case((1, 64, 32, 8), "NHWC"),  # exactly full blocks, and one position more
    Case((1, 2049, 1, 8), "NHWC"),
    Case((1, 2, 64, 65), "NCHW"),
    Case((6, 16, 16, 16), "NHWC", mean=100),
    Case((6, 16, 16, 16), "NCHW", mean=100),
    Case((0, 4, 4, 3), "NHWC"),
    Case((2, 5, 0, 4), "NCHW"),
    Case((2, 4, 4, 0), "NHWC"),
    Case((2, 0, 4, 4), "NCHW"),
)


def param_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


@dataclass(frozen=True)
class Forward:
    """A call of FusedBatchNorm with its inputs where the kernels are, and the same in float64."""

    inputs: ForwardInputs
    attributes: ForwardAttributes
    expected: ForwardOutputs


@dataclass(frozen=True)
class Gradient:
    """A call of FusedBatchNormGrad with its inputs where the kernels are, and the same in float64."""

    inputs: GradInputs
    attributes: GradAttributes
    expected: GradOutputs


def forward_case(
    case: Case, dtype: np.dtype[Any], put: Put, *, is_training: bool = True, exponential_avg_factor: float = 1
) -> Forward:
    random = np.random.default_rng(0)
    x = random.normal(case.mean, 1.5, case.shape).astype(dtype)
    params = [random.uniform(0.5, 2, case.channels).astype(param_dtype(dtype)) for _ in range(4)]
    if is_training and exponential_avg_factor == 1:
        params[2:] = [np.empty(0, param_dtype(dtype))] * 2
    inputs = ForwardInputs(x, *params)
    attributes = ForwardAttributes(EPSILON, exponential_avg_factor, case.data_format, is_training)
    geometry = plan_forward(inputs, attributes).geometry
    expected = reference.fused_batch_norm(np, _each(inputs, _as_float64), attributes, geometry)
    return Forward(_each(inputs, put), attributes, expected)


def gradient_case(case: Case, dtype: np.dtype[Any], put: Put, *, is_training: bool = True) -> Gradient:
    random = np.random.default_rng(0)
    x = random.normal(case.mean, 1.5, case.shape).astype(dtype)
    dy = random.normal(0.5, 1, case.shape).astype(dtype)
    scale, variance = (random.uniform(0.5, 2, case.channels).astype(param_dtype(dtype)) for _ in range(2))
    mean = random.normal(case.mean, 1, case.channels).astype(param_dtype(dtype))
    inputs = GradInputs(dy, x, scale, mean, variance)
    attributes = GradAttributes(EPSILON, case.data_format, is_training)
    geometry = plan_gradient(inputs, attributes).geometry
    expected = reference.fused_batch_norm_grad(np, _each(inputs, _as_float64), attributes, geometry)
    return Gradient(_each(inputs, put), attributes, expected)


def assert_near(outputs: Any, expected: Any, dtype: np.dtype[Any], to_host: Callable[[Any], NDArray[Any]]) -> None:
    """Compares all outputs of a call: dtypes, shapes and numbers."""
    for field in dataclasses.fields(outputs):
        actual, wanted = to_host(getattr(outputs, field.name)), getattr(expected, field.name)
        is_tensor = field.name in ("y", "x_backprop")
        assert actual.dtype == (dtype if is_tensor else param_dtype(dtype)), field.name
        assert actual.shape == wanted.shape, field.name
        largest = np.abs(wanted).max(initial=0, where=~np.isnan(wanted))
        np.testing.assert_allclose(
            actual.astype(np.float64),
            wanted,
            rtol=ROUNDING[dtype] if is_tensor else 0,
            atol=ACCURACY[param_dtype(dtype)] * largest,
            err_msg=field.name,
        )


def _each(structure: Any, function: Callable[[Any], Any]) -> Any:
    values = {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
    return type(structure)(**{name: None if value is None else function(value) for name, value in values.items()})


def _as_float64(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64)
