"""The ops LayerNorm and LayerNormGrad: their inputs, attributes, outputs and checks, and their family.

T is the dtype of x. U is the dtype of scale, offset, mean and rstd: float64 if T is float64, else float32. S is the
shape of scale; the shape of x ends with it. A group is the elements of x that are normalized together: all with the
same indices in the dimensions before S.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.operation import Family, Op
from gradserve_server.tensors.spec import FLOATING, TensorSpec, shape_text, widened


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of LayerNorm.

    Attributes:
        x: T.
        scale: U, shape S.
        offset: U, shape S.
    """

    x: Array
    scale: Array
    offset: Array


@dataclass(frozen=True)
class ForwardAttributes:
    """Attributes of LayerNorm.

    Attributes:
        epsilon: The number added to the variance before the square root. The default is PyTorch's.
    """

    epsilon: float = 1e-5


@dataclass(frozen=True)
class ForwardOutputs:
    """Outputs of LayerNorm.

    Attributes:
        y: T, the shape of x.
        mean: U, the shape of x without its last len(S) dimensions.
        rstd: U, the shape of mean: 1 / sqrt(variance + epsilon).
    """

    y: Array
    mean: Array
    rstd: Array


@dataclass(frozen=True)
class GradInputs:
    """Inputs of LayerNormGrad.

    Attributes:
        y_backprop: T, the shape of x: the gradient with respect to y.
        x: T, as in the forward call.
        scale: U, shape S, as in the forward call.
        mean: U, an output of the forward call.
        rstd: U, an output of the forward call.
    """

    y_backprop: Array
    x: Array
    scale: Array
    mean: Array
    rstd: Array


@dataclass(frozen=True)
class GradAttributes:
    """The attributes of LayerNormGrad, which has none."""


@dataclass(frozen=True)
class GradOutputs:
    """Outputs of LayerNormGrad.

    Attributes:
        x_backprop: T, the shape of x.
        scale_backprop: U, shape S.
        offset_backprop: U, shape S.
    """

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array


@dataclass(frozen=True)
class Geometry:
    """x viewed as a matrix with a row for each group.

    Attributes:
        stats_shape: The shape of mean and rstd, which is the shape of x without its last len(S) dimensions.
        size: The number of elements of a group, and of scale.
    """

    stats_shape: tuple[int, ...]
    size: int

    @property
    def groups(self) -> int:
        """The number of groups of x."""
        return math.prod(self.stats_shape)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, [groups, size]."""
        return (self.groups, self.size)


@dataclass(frozen=True)
class Plan:
    """A checked call.

    Attributes:
        geometry: The geometry of x.
        output_specs: The specs of all outputs, in order.
    """

    geometry: Geometry
    output_specs: tuple[TensorSpec, ...]


def plan_forward(inputs: ForwardInputs, attributes: ForwardAttributes) -> Plan:
    """Checks a call of LayerNorm.

    Raises:
        InvalidArgumentError: An argument is invalid; the message names it, what was given and what was expected.
    """
    if not (math.isfinite(attributes.epsilon) and attributes.epsilon >= 0):
        raise InvalidArgumentError(
            f"expected a finite epsilon of at least 0, got {attributes.epsilon}", field="epsilon"
        )
    _check_x_dtype(inputs.x)
    _check_param_dtypes(inputs, ("scale", "offset"))
    geometry = _check_scale_shape(inputs)
    _check_shape(inputs, "offset", inputs.scale.shape, "that of scale")
    stats = TensorSpec(inputs.scale.dtype, geometry.stats_shape)
    return Plan(geometry, (_spec(inputs.x), stats, stats))


def plan_gradient(inputs: GradInputs, attributes: GradAttributes) -> Plan:
    """Checks a call of LayerNormGrad.

    Raises:
        InvalidArgumentError: An argument is invalid; the message names it, what was given and what was expected.
    """
    _check_x_dtype(inputs.x)
    _check_dtype(inputs, "y_backprop", inputs.x.dtype)
    _check_param_dtypes(inputs, ("scale", "mean", "rstd"))
    geometry = _check_scale_shape(inputs)
    _check_shape(inputs, "y_backprop", inputs.x.shape, "that of x")
    for name in ("mean", "rstd"):
        _check_shape(inputs, name, geometry.stats_shape, "that of x without the dimensions of scale")
    return Plan(geometry, (_spec(inputs.x), _spec(inputs.scale), _spec(inputs.scale)))


def _check_x_dtype(x: Array) -> None:
    if x.dtype not in FLOATING:
        *others, last = (dtype.name for dtype in FLOATING)
        raise InvalidArgumentError(f"expected x of {', '.join(others)} or {last}, got {x.dtype}", field="x")


def _check_param_dtypes(inputs: Any, names: tuple[str, ...]) -> None:
    for name in names:
        _check_dtype(inputs, name, widened(inputs.x.dtype))


def _check_dtype(inputs: Any, name: str, expected: np.dtype[Any]) -> None:
    given = getattr(inputs, name).dtype
    if given != expected:
        raise InvalidArgumentError(f"expected {name} of {expected} for x of {inputs.x.dtype}, got {given}", field=name)


def _check_scale_shape(inputs: Any) -> Geometry:
    x, scale = tuple(inputs.x.shape), tuple(inputs.scale.shape)
    if not scale:
        raise InvalidArgumentError("expected scale with at least one dimension, got shape []", field="scale")
    if x[-len(scale) :] != scale:
        raise InvalidArgumentError(
            f"expected scale of a shape that the shape of x, {shape_text(x)}, ends with, got {shape_text(scale)}",
            field="scale",
        )
    return Geometry(x[: len(x) - len(scale)], math.prod(scale))


def _check_shape(inputs: Any, name: str, expected: Sequence[int], which: str) -> None:
    given = tuple(getattr(inputs, name).shape)
    if given != tuple(expected):
        raise InvalidArgumentError(
            f"expected {name} of shape {shape_text(tuple(expected))}, {which}, got {shape_text(given)}", field=name
        )


def _spec(array: Array) -> TensorSpec:
    return TensorSpec(array.dtype, tuple(array.shape))


class LayerNorm(Family, Protocol):
    """The computations on one device. Inputs are checked and in its memory; outputs are allocated there."""

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes LayerNorm."""
        ...

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        """Computes LayerNormGrad."""
        ...


FAMILY = "layer_norm"


def _forward(family: LayerNorm, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan.geometry)


def _gradient(family: LayerNorm, inputs: GradInputs, attributes: GradAttributes, plan: Plan) -> GradOutputs:
    return family.gradient(inputs, plan.geometry)


def _gradient_scratch_bytes(_inputs: GradInputs, _attributes: object, plan: Plan) -> int:
    """Returns a bound: the sums for scale and offset, in float64, of every 32 groups."""
    geometry = plan.geometry
    return 16 * geometry.size * -(-geometry.groups // 32)


LAYER_NORM = Op(
    name="LayerNorm",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
)

LAYER_NORM_GRAD = Op(
    name="LayerNormGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
    scratch_bytes=_gradient_scratch_bytes,
)
