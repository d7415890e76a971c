"""Random calls of LayerNorm and LayerNormGrad, and how close results must be to those of the reference in float64."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.layer_norm.reference import layer_norm, layer_norm_grad
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors import spec as dtypes

Forward: TypeAlias = Callable[[ForwardInputs, ForwardAttributes, Geometry], ForwardOutputs]
Gradient: TypeAlias = Callable[[GradInputs, Geometry], GradOutputs]

TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of what is rounded to that, relative to its largest magnitude."""

EPSILON = 1e-5
ATTRIBUTES = ForwardAttributes(EPSILON)


def make_inputs(groups: int, size: int, dtype: Any) -> tuple[ForwardInputs, GradInputs]:
    """Returns the inputs of both ops; the second gets the moments that x has."""
    random = np.random.default_rng(1)
    own, param = np.dtype(dtype), dtypes.widened(np.dtype(dtype))
    x, y_backprop = (random.normal(mean, 2, (groups, size)).astype(np.float32).astype(own) for mean in (3, 0.1))
    scale, offset = random.uniform(0.5, 2, size).astype(param), random.standard_normal(size).astype(param)
    mean, variance = np.zeros(groups), np.ones(groups)
    if size > 0:
        mean, variance = x.mean(axis=1, dtype=np.float64), x.astype(np.float64).var(axis=1)
    stats = (mean.astype(param), (1 / np.sqrt(variance + EPSILON)).astype(param))
    return ForwardInputs(x, scale, offset), GradInputs(y_backprop, x, scale, *stats)


def widened(inputs: Any) -> Any:
    """Returns a dataclass of arrays with all of them in float64."""
    return type(inputs)(**{name: array.astype(np.float64) for name, array in vars(inputs).items()})


def assert_near(outputs: Any, expected: Any, dtype: Any, terms: float = 0.0) -> None:
    """Compares all outputs with those in float64.

    Args:
        outputs: What was computed.
        expected: The same in float64.
        dtype: T.
        terms: The largest magnitude of what x_backprop is the difference of.
    """
    for name, output in vars(outputs).items():
        wanted: NDArray[Any] = getattr(expected, name)
        own = np.dtype(dtype) if name in ("y", "x_backprop") else dtypes.widened(np.dtype(dtype))
        assert (output.dtype, output.shape) == (own, wanted.shape), name
        least = terms if name == "x_backprop" else 0.0
        tolerance = TOLERANCES[own.name] * np.max(np.abs(wanted), initial=least, where=np.isfinite(wanted))
        np.testing.assert_allclose(output.astype(np.float64), wanted, 0, tolerance, err_msg=name)


def check(forward: Forward, gradient: Gradient, groups: int, size: int, dtype: Any) -> bytes:
    """Computes both ops, with arrays of the host, beside the reference; returns all results."""
    geometry = Geometry((groups,), size)
    inputs, grad_inputs = make_inputs(groups, size, dtype)
    outputs, gradients = forward(inputs, ATTRIBUTES, geometry), gradient(grad_inputs, geometry)
    assert_near(outputs, layer_norm(np, widened(inputs), ATTRIBUTES, geometry), dtype)
    wide = widened(grad_inputs)
    terms = np.max(np.abs(wide.y_backprop * wide.scale * wide.rstd[:, None]), initial=0)
    assert_near(gradients, layer_norm_grad(np, wide, geometry), dtype, terms)
    return raw_bytes(outputs) + raw_bytes(gradients)


def raw_bytes(outputs: Any) -> bytes:
    """Returns the bytes of all outputs."""
    return b"".join(array.tobytes() for array in vars(outputs).values())
