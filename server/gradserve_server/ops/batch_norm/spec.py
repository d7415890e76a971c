"""The ops FusedBatchNorm and FusedBatchNormGrad: their inputs, attributes, outputs and checks, and their family.

T is the dtype of x. U is the dtype of all per-channel values: float32, or float64 if T is. C is the number of channels.
Messages, and the order of the checks, are TensorFlow's where it has them.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.operation import Family, Op
from gradserve_server.tensors.spec import TensorSpec, check_type_attribute, dtype_text, shape_text, widened

_RANKS = {"NHWC": 4, "NCHW": 4, "NDHWC": 5, "NCDHW": 5}
"""The rank of x, by data_format."""


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of FusedBatchNorm.

    Attributes:
        x: T, of rank 4 or 5.
        scale: U, shape [C].
        offset: U, shape [C].
        mean: U, shape [C]. In training with an exponential_avg_factor of 1 not read, and of any length.
        variance: U, likewise.
    """

    x: Array
    scale: Array
    offset: Array
    mean: Array
    variance: Array


@dataclass(frozen=True)
class ForwardAttributes:
    """Attributes of FusedBatchNorm, with TensorFlow's defaults."""

    epsilon: float = 1e-4
    exponential_avg_factor: float = 1.0
    data_format: str = "NHWC"
    is_training: bool = True


@dataclass(frozen=True)
class ForwardOutputs:
    """Outputs of FusedBatchNorm.

    Attributes:
        y: T, the shape of x.
        batch_mean: U, shape [C]: the moving mean in training, else the input `mean`.
        batch_variance: U, shape [C]: the moving variance in training, else the input `variance`.
        reserve_space_1: U, shape [C]: the mean of x in training, else zeros.
        reserve_space_2: U, shape [C]: the population variance of x in training, else zeros.
        reserve_space_3: U, shape []: zero.
    """

    y: Array
    batch_mean: Array
    batch_variance: Array
    reserve_space_1: Array
    reserve_space_2: Array
    reserve_space_3: Array


@dataclass(frozen=True)
class GradInputs:
    """Inputs of FusedBatchNormGrad.

    Attributes:
        y_backprop: T, the shape of x.
        x: T, of rank 4 or 5.
        scale: U, shape [C].
        reserve_space_1: U, shape [C]: the mean of x in training, else the population mean.
        reserve_space_2: U, shape [C]: the variance of x in training, else the population variance.
        reserve_space_3: Not read.
    """

    y_backprop: Array
    x: Array
    scale: Array
    reserve_space_1: Array
    reserve_space_2: Array
    reserve_space_3: Array | None = None


@dataclass(frozen=True)
class GradAttributes:
    """Attributes of FusedBatchNormGrad, with TensorFlow's defaults."""

    epsilon: float = 1e-4
    data_format: str = "NHWC"
    is_training: bool = True


@dataclass(frozen=True)
class GradOutputs:
    """Outputs of FusedBatchNormGrad.

    Attributes:
        x_backprop: T, the shape of x.
        scale_backprop: U, shape [C].
        offset_backprop: U, shape [C].
        reserve_space_4: U, shape [0].
        reserve_space_5: U, shape [0].
    """

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    reserve_space_4: Array
    reserve_space_5: Array


@dataclass(frozen=True)
class Geometry:
    """The place of the channels in x, which is treated as [outer, channels, inner].

    Channels last: outer is the number of elements of a channel and inner is 1. Channels first: outer is the batch
    and inner the size of an image.
    """

    outer: int
    channels: int
    inner: int

    @property
    def count(self) -> int:
        """M, the number of elements of a channel."""
        return self.outer * self.inner

    @property
    def shape(self) -> tuple[int, int, int]:
        """[outer, channels, inner]."""
        return (self.outer, self.channels, self.inner)


@dataclass(frozen=True)
class Plan:
    """A checked call.

    Attributes:
        geometry: The geometry of x.
        output_specs: The specs of all outputs, in their order.
    """

    geometry: Geometry
    output_specs: tuple[TensorSpec, ...]


def plan_forward(inputs: ForwardInputs, attributes: ForwardAttributes) -> Plan:
    """Checks a call of FusedBatchNorm.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_format(attributes.data_format)
    param_dtype = _check_input_dtype(inputs.x, "x")
    params = {name: getattr(inputs, name) for name in ("scale", "offset", "mean", "variance")}
    for name, array in params.items():
        _check_param_dtype(array, param_dtype, name)
    _check_image_rank(inputs.x, "x")
    for name, array in params.items():
        _check_vector(array, name, {"mean": "estimated_mean", "variance": "estimated_variance"}.get(name, name))
    _check_format_rank(inputs.x, attributes.data_format, "x")
    geometry = _geometry(inputs.x, attributes.data_format)
    for name in ("scale", "offset"):
        _check_channels(params[name], geometry, name)
    if not attributes.is_training or attributes.exponential_avg_factor != 1:
        reason = "exponential_avg_factor != 1" if attributes.is_training else "is_training=false"
        for name in ("mean", "variance"):
            _check_channels(params[name], geometry, name, f"When {reason}, ")
    per_channel = TensorSpec(param_dtype, (geometry.channels,))
    return Plan(geometry, (_spec(inputs.x), *[per_channel] * 4, TensorSpec(param_dtype, ())))


def plan_gradient(inputs: GradInputs, attributes: GradAttributes) -> Plan:
    """Checks a call of FusedBatchNormGrad.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_format(attributes.data_format)
    param_dtype = _check_input_dtype(inputs.y_backprop, "y_backprop")
    if inputs.x.dtype != inputs.y_backprop.dtype:
        expected, given = dtype_text(inputs.y_backprop.dtype), dtype_text(inputs.x.dtype)
        raise InvalidArgumentError(f"x must have the dtype of y_backprop, {expected}, got {given}", field="x")
    names = ("scale", "reserve_space_1", "reserve_space_2")
    for name in names:
        _check_param_dtype(getattr(inputs, name), param_dtype, name)
    _check_image_rank(inputs.y_backprop, "y_backprop")
    _check_image_rank(inputs.x, "x")
    for name, called in zip(names, ("scale", "saved mean", "saved variance"), strict=True):
        _check_vector(getattr(inputs, name), name, called)
    if inputs.x.shape != inputs.y_backprop.shape:
        raise InvalidArgumentError(
            f"x and y_backprop must have same shape, but x has shape {shape_text(inputs.x.shape)} "
            f"and y_backprop has shape {shape_text(inputs.y_backprop.shape)}",
            field="y_backprop",
        )
    _check_format_rank(inputs.x, attributes.data_format, "x")
    geometry = _geometry(inputs.x, attributes.data_format)
    for name in names:
        _check_channels(getattr(inputs, name), geometry, name)
    per_channel, nothing = TensorSpec(param_dtype, (geometry.channels,)), TensorSpec(param_dtype, (0,))
    return Plan(geometry, (_spec(inputs.x), per_channel, per_channel, nothing, nothing))


def _check_format(data_format: str) -> None:
    if data_format not in _RANKS:
        allowed = ", ".join(f'"{name}"' for name in _RANKS)
        raise InvalidArgumentError(
            f"Value for attr 'data_format' of \"{data_format}\" is not in the list of allowed values: {allowed}",
            field="data_format",
        )


def _check_input_dtype(x: Array, name: str) -> np.dtype[Any]:
    """Returns U for the T of x."""
    check_type_attribute(x.dtype, name)
    return widened(x.dtype)


def _check_param_dtype(array: Array, expected: np.dtype[Any], name: str) -> None:
    if array.dtype != expected:
        raise InvalidArgumentError(
            f"Value for attr 'U' of {dtype_text(array.dtype)} is not in the list of allowed values: "
            f"{dtype_text(expected)}; got it for {name}",
            field=name,
        )


def _check_image_rank(array: Array, name: str) -> None:
    if len(array.shape) not in (4, 5):
        raise InvalidArgumentError(f"input must be 4 or 5-dimensional{shape_text(array.shape)}", field=name)


def _check_format_rank(array: Array, data_format: str, name: str) -> None:
    """Checks the rank as TensorFlow's shape function does; its kernels accept ranks 4 and 5 for any format."""
    rank = _RANKS[data_format]
    if len(array.shape) != rank:
        raise InvalidArgumentError(
            f"Shape must be rank {rank} but is rank {len(array.shape)} for {name} {shape_text(array.shape)} "
            f"in data_format {data_format}",
            field=name,
        )


def _check_vector(array: Array, name: str, called: str) -> None:
    if len(array.shape) != 1:
        raise InvalidArgumentError(f"{called} must be 1-dimensional{shape_text(array.shape)}", field=name)


def _check_channels(array: Array, geometry: Geometry, name: str, condition: str = "") -> None:
    if array.shape[0] != geometry.channels:
        raise InvalidArgumentError(
            f"{condition}{name} must have the same number of elements as the channels of x, "
            f"got {array.shape[0]} and {geometry.channels}",
            field=name,
        )


def _geometry(x: Array, data_format: str) -> Geometry:
    if data_format.endswith("C"):
        return Geometry(math.prod(x.shape[:-1]), x.shape[-1], 1)
    return Geometry(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _spec(array: Array) -> TensorSpec:
    return TensorSpec(array.dtype, tuple(array.shape))


class BatchNorm(Family, Protocol):
    """FusedBatchNorm on one device. Inputs are checked and in its memory, where outputs are, too.

    Attributes:
        fuses_relu: Whether the kernels can compute a relu behind it in the same pass over memory.
    """

    fuses_relu: bool

    def forward(
        self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry, *, has_relu: bool = False
    ) -> ForwardOutputs:
        """Computes FusedBatchNorm; with `has_relu` max(y, 0) for y."""
        ...

    def gradient(
        self,
        inputs: GradInputs,
        attributes: GradAttributes,
        geometry: Geometry,
        relu_offset: Array | None = None,
    ) -> GradOutputs:
        """Computes FusedBatchNormGrad.

        Args:
            inputs: The inputs.
            attributes: The attributes.
            geometry: The geometry of x.
            relu_offset: U, shape [C]: the offset of a forward call with a relu. Then `y_backprop` is the gradient with
                respect to max(y, 0). Where y was above 0 is computed again from x, by the arithmetic of that call.
        """
        ...


FAMILY = "batch_norm"


def _forward(family: BatchNorm, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan.geometry)


def _gradient(family: BatchNorm, inputs: GradInputs, attributes: GradAttributes, plan: Plan) -> GradOutputs:
    return family.gradient(inputs, attributes, plan.geometry)


def kernel_scratch_bytes(geometry: Geometry) -> int:
    """Returns a bound: two sums in float64 for each column of every 128 rows, and a few values for each column.

    A row has an element of every channel, or more of them if these are few.
    """
    size = geometry.count * geometry.channels
    columns = max(geometry.channels * (geometry.inner if geometry.inner < _SHORT else 1), min(2 * 128, size))
    return size // 8 + 64 * columns


_SHORT = 16
"""Elements that lie together in memory are columns of a row if they are fewer."""


def _scratch_bytes(_inputs: object, _attributes: object, plan: Plan) -> int:
    return kernel_scratch_bytes(plan.geometry)


FUSED_BATCH_NORM = Op(
    name="FusedBatchNorm",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
    scratch_bytes=_scratch_bytes,
)

FUSED_BATCH_NORM_GRAD = Op(
    name="FusedBatchNormGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
    scratch_bytes=_scratch_bytes,
)
