"""Calls of FusedBatchNorm on the host, and what is compared with the reference in float64."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.reference import fused_batch_norm, fused_batch_norm_grad
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

TOLERANCES = {np.float32: 1e-5, np.float64: 1e-12, np.float16: 2**-10, ml_dtypes.bfloat16: 2**-7}
"""Relative, of what is rounded to T."""


MIB = 1 << 20


SHAPES = {
    "one element": (1, 1, 1, 1),
    "one channel": (3, 7, 5, 1),
    "three channels": (3, 7, 5, 3),
    "more rows than fit together": (33, 17, 19, 3),
    "M = 1": (1, 1, 1, 70),
    "many channels, M = 2": (2, 1, 1, 2048),
    "S = 1": (9, 1, 1, 7),
    "N = 1": (1, 7, 5, 40),
    "five axes": (2, 3, 4, 5, 6),
    "small planes": (6, 3, 3, 40),
    "planes of 16": (3, 4, 4, 5),
    "one more than a block of rows": (129, 1, 1, 200),
    "one less than two blocks of rows": (255, 1, 1, 200),
    "several chunks": (65, 64, 64, 2),
    "planes of a block": (2, 32, 64, 3),
    "planes of a block and one": (2, 3, 683, 3),
    "an image of many channels": (2, 9, 9, 300),
}
"""With the channels last."""


def unprepared(parallel: ForkJoin) -> CpuBatchNorm:
    return CpuBatchNorm(CpuDevice(BufferPool(64 * MIB)), parallel)


def data_format(shape: tuple[int, ...], channels_first: bool) -> str:
    if len(shape) == 4:
        return "NCHW" if channels_first else "NHWC"
    return "NCDHW" if channels_first else "NDHWC"


def make_x(shape: tuple[int, ...], channels_first: bool, dtype: Any, mean: float = 3, deviation: float = 2) -> Any:
    x = np.random.default_rng(1).normal(mean, deviation, shape).astype(dtype)
    return np.ascontiguousarray(np.moveaxis(x, -1, 1)) if channels_first else x


def forward_inputs(x: NDArray[Any], channels: int) -> ForwardInputs:
    rng = np.random.default_rng(2)
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    scale, offset, mean, variance = rng.uniform(0.5, 2, (4, channels)).astype(dtype)
    return ForwardInputs(x, scale, offset, mean, variance)


def grad_inputs(x: NDArray[Any], channels: int) -> GradInputs:
    inputs = forward_inputs(x, channels)
    y_backprop = np.random.default_rng(3).normal(0.1, 1, x.shape).astype(x.dtype)
    return GradInputs(y_backprop, x, inputs.scale, inputs.mean, inputs.variance)


def forward(batch_norm: CpuBatchNorm, inputs: ForwardInputs, attributes: ForwardAttributes) -> ForwardOutputs:
    return batch_norm.forward(inputs, attributes, plan_forward(inputs, attributes).geometry)


def gradient(batch_norm: CpuBatchNorm, inputs: GradInputs, attributes: GradAttributes) -> GradOutputs:
    return batch_norm.gradient(inputs, attributes, plan_gradient(inputs, attributes).geometry)


def in_float64(inputs: Any) -> Any:
    return type(inputs)(
        **{name: None if value is None else value.astype(np.float64) for name, value in vars(inputs).items()}
    )


def check(outputs: ForwardOutputs | GradOutputs, expected: Any, dtype: Any, rounding: float = 0) -> None:
    """Compares all outputs; `rounding` is an absolute error of y to allow on top."""
    for name, value in vars(outputs).items():
        want = getattr(expected, name)
        assert value.shape == want.shape, name
        is_large = name in ("y", "x_backprop")
        assert value.dtype == (dtype if is_large else np.float64 if dtype == np.float64 else np.float32), name
        relative = TOLERANCES[dtype if is_large or dtype == np.float64 else np.float32]
        absolute = relative * np.max(np.abs(want), initial=0, where=np.isfinite(want)) + rounding * (name == "y")
        np.testing.assert_allclose(value.astype(np.float64), want, relative, absolute, err_msg=name)


def check_forward(
    batch_norm: CpuBatchNorm, inputs: ForwardInputs, attributes: ForwardAttributes, rounding: float = 0
) -> None:
    geometry = plan_forward(inputs, attributes).geometry
    with np.errstate(all="ignore"):
        expected = fused_batch_norm(np, in_float64(inputs), attributes, geometry)
    check(batch_norm.forward(inputs, attributes, geometry), expected, inputs.x.dtype.type, rounding)


def check_relu(batch_norm: CpuBatchNorm, inputs: ForwardInputs, name: str, is_training: bool) -> None:
    """The relu is that of y, and its gradient that of a y_backprop that is 0 where the relu is."""
    attributes = ForwardAttributes(1e-3, 1.0, name, is_training)
    geometry = plan_forward(inputs, attributes).geometry
    plain, found = (batch_norm.forward(inputs, attributes, geometry, has_relu=each) for each in (False, True))
    for output, value in vars(replace(plain, y=np.where(plain.y <= 0, plain.y.dtype.type(0), plain.y))).items():
        assert getattr(found, output).tobytes() == value.tobytes(), output
    mean, variance = inputs.mean, inputs.variance
    if is_training:
        mean, variance = found.reserve_space_1, found.reserve_space_2
    dy = np.random.default_rng(3).normal(0.1, 1, inputs.x.shape).astype(inputs.x.dtype)
    given, grad_attributes = (
        GradInputs(dy, inputs.x, inputs.scale, mean, variance),
        GradAttributes(1e-3, name, is_training),
    )
    masked = replace(given, y_backprop=np.where(found.y > 0, dy, dy.dtype.type(0)))
    expected = fused_batch_norm_grad(np, in_float64(masked), grad_attributes, geometry)
    check(batch_norm.gradient(given, grad_attributes, geometry, inputs.offset), expected, dy.dtype.type)


def check_gradient(batch_norm: CpuBatchNorm, inputs: GradInputs, attributes: GradAttributes) -> None:
    geometry = plan_gradient(inputs, attributes).geometry
    with np.errstate(all="ignore"):
        expected = fused_batch_norm_grad(np, in_float64(inputs), attributes, geometry)
    check(batch_norm.gradient(inputs, attributes, geometry), expected, inputs.x.dtype.type)
