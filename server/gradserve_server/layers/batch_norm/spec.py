"""Inputs, attributes and outputs of the calls of a layer, their checks, and the choice of an implementation.

T is the dtype of the inputs. U is the dtype of arithmetic: float64 if T is float64, else float32. V is the dtype of the
variables. C is the number of channels, N the first size of the inputs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument
from gradserve_server.layers.batch_norm.variables import Variables
from gradserve_server.limits import MAX_ARRAY_DIMENSIONS
from gradserve_server.ops.activation.spec import gradient_of_result
from gradserve_server.ops.batch_norm.spec import Geometry
from gradserve_server.tensors.spec import FLOAT32, FLOAT64, FLOATING, TensorSpec, dtype_text, widened


class Implementation(Enum):
    """TensorFlow's implementations of the layer."""

    FUSED = auto()
    """The FusedBatchNorm op."""
    CORE_FUSED = auto()
    """The layer of tf.layers with FusedBatchNorm."""
    CORE = auto()
    """The layer of tf.layers without FusedBatchNorm."""
    LEGACY = auto()
    """Plain operations."""

    @property
    def is_fused(self) -> bool:
        """True if FusedBatchNorm computes the layer: the moving variance then has Bessel's correction."""
        return self in (Implementation.FUSED, Implementation.CORE_FUSED)

    def variable_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype of the variables for inputs of a dtype."""
        if self.is_fused:
            return FLOAT32
        return dtype if self is Implementation.LEGACY else widened(dtype)


@dataclass(frozen=True)
class CallKind:
    """The properties of a call that decide the implementation."""

    rank: int
    dtype: np.dtype[Any]
    is_training: bool
    has_batch_weights: bool
    has_adjustment: bool


def choose_implementation(config: BatchNormConfig, call: CallKind) -> Implementation:
    """Returns the implementation that TensorFlow would choose.

    Raises:
        InvalidArgumentError: TensorFlow has none for these arguments.
    """
    fused = config.fused is not False
    can_fuse = not (call.has_batch_weights or config.renorm or call.has_adjustment)
    core_can_do = config.has_default_updates and not config.zero_debias_moving_mean
    if fused and can_fuse and (call.rank == 2 or (call.rank == 4 and not core_can_do)):
        if call.dtype == FLOAT64:
            raise InvalidArgumentError(
                "Value passed to parameter 'x' has DataType float64 not in list of allowed values: float16, "
                "bfloat16, float32; the fused implementation takes no other: expected fused=False",
                field="inputs",
            )
        return Implementation.FUSED
    if core_can_do and not call.has_batch_weights:
        is_fused = fused and can_fuse and call.rank in (4, 5) and call.dtype != FLOAT64
        return Implementation.CORE_FUSED if is_fused else Implementation.CORE
    if config.renorm:
        raise InvalidArgumentError(
            "renorm is not supported with batch_weights, updates_collections or zero_debias_moving_mean; "
            "got batch_weights",
            field="batch_weights",
        )
    return Implementation.LEGACY


def has_updates(config: BatchNormConfig, call: CallKind, implementation: Implementation) -> bool:
    """Returns True if a call updates the moving averages; tf.layers does not update those of an untrainable layer."""
    is_core = implementation in (Implementation.CORE, Implementation.CORE_FUSED)
    return call.is_training and (config.trainable or not is_core)


def ignored_arguments(
    config: BatchNormConfig, call: CallKind, implementation: Implementation
) -> tuple[IgnoredArgument, ...]:
    """Returns the arguments that have no effect in this call, though they may in others."""
    return tuple(IgnoredArgument(*each) for each in _ignored(config, call, implementation))


def _ignored(config: BatchNormConfig, call: CallKind, implementation: Implementation) -> Iterator[tuple[str, str]]:
    if config.fused and not implementation.is_fused:
        reasons = {
            "there are batch_weights": call.has_batch_weights,
            "renorm is on": config.renorm,
            "there is an adjustment": call.has_adjustment,
            "the inputs are of double": call.dtype == FLOAT64,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), f"the inputs are of rank {call.rank}")
        yield "fused", f"not possible: {reason}"
    if implementation is Implementation.LEGACY:
        for name in config.param_regularizers:
            if config.has_variable(name):
                yield f"param_regularizers[{name}]", "the legacy implementation has no regularizers"
    if call.has_adjustment:
        if implementation is Implementation.LEGACY:
            yield "adjustment", "the legacy implementation does not adjust"
        elif not call.is_training and config.adjustment is None:
            yield "adjustment", "is_training is false"
    if call.has_batch_weights and not call.is_training:
        yield "batch_weights", "is_training is false"
    if call.is_training and not has_updates(config, call, implementation):
        yield "updates_collections", "trainable is false: this implementation does not update the moving averages"


_RANKS = range(2, 6)


@dataclass(frozen=True)
class CallInputs:
    """The tensors that the caller gives.

    Attributes:
        inputs: T, of rank 2 to 5.
        batch_weights: Floating, integers or bool, shape [N].
        adjustment_scale: Floating, broadcasts to the shape of the inputs; both or none.
        adjustment_bias: Like `adjustment_scale`.
    """

    inputs: Array
    batch_weights: Array | None = None
    adjustment_scale: Array | None = None
    adjustment_bias: Array | None = None


@dataclass(frozen=True)
class ForwardInputs(CallInputs):
    """The caller's tensors and the variables, by TensorFlow's names; each is V, or None if the layer does not have it.

    Attributes:
        beta: Shape [C], like all below except the weights, which are scalars.
    """

    beta: Array | None = None
    gamma: Array | None = None
    moving_mean: Array | None = None
    moving_variance: Array | None = None
    renorm_mean: Array | None = None
    renorm_stddev: Array | None = None
    renorm_mean_weight: Array | None = None
    renorm_stddev_weight: Array | None = None

    @classmethod
    def of(cls, given: CallInputs, variables: Variables) -> "ForwardInputs":
        """Returns the caller's tensors together with the variables."""
        averages = variables.averages
        return cls(
            inputs=given.inputs,
            batch_weights=given.batch_weights,
            adjustment_scale=given.adjustment_scale,
            adjustment_bias=given.adjustment_bias,
            beta=variables.beta,
            gamma=variables.gamma,
            moving_mean=averages.moving_mean,
            moving_variance=averages.moving_variance,
            renorm_mean=averages.renorm_mean,
            renorm_stddev=averages.renorm_stddev,
            renorm_mean_weight=averages.renorm_mean_weight,
            renorm_stddev_weight=averages.renorm_stddev_weight,
        )


@dataclass(frozen=True)
class ForwardAttributes:
    """The attributes of a forward.

    Attributes:
        saves: Whether to keep what the gradient needs.
    """

    config: BatchNormConfig
    is_training: bool = True
    saves: bool = True


@dataclass(frozen=True)
class ForwardOutputs:
    """The results of a forward, and what its gradient needs; None where there is nothing.

    Attributes:
        outputs: T, the shape of the inputs.
        batch_mean: U, shape [C], in training: the mean for the update of the moving mean.
        batch_variance: U, shape [C], in training: the variance for the update of the moving variance.
        mean: U, shape [C]: the mean that the inputs were normalised by.
        variance: U, shape [C]: the variance that they were normalised by; in training the population variance.
        r: U, shape [C]: the correction of renorm.
        d: Like `r`.
        activation_saved: T, the shape of the inputs: the argument of the gradient of the activation. None if that
            gradient is computed together with the normalization's.
        beta_regularization_loss: float64, a scalar.
        gamma_regularization_loss: float64, a scalar.
    """

    outputs: Array
    batch_mean: Array | None = None
    batch_variance: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    r: Array | None = None
    d: Array | None = None
    activation_saved: Array | None = None
    beta_regularization_loss: Array | None = None
    gamma_regularization_loss: Array | None = None

    @property
    def regularization_losses(self) -> dict[str, float]:
        """The existing losses, by variable; they must be in host memory."""
        losses = {"beta": self.beta_regularization_loss, "gamma": self.gamma_regularization_loss}
        return {name: float(loss) for name, loss in losses.items() if loss is not None}


@dataclass(frozen=True)
class BackwardInputs:
    """The gradient with respect to the outputs, and what the forward used or kept; see `ForwardOutputs`."""

    outputs_gradient: Array
    inputs: Array
    mean: Array
    variance: Array
    beta: Array | None = None
    gamma: Array | None = None
    batch_weights: Array | None = None
    adjustment_scale: Array | None = None
    adjustment_bias: Array | None = None
    r: Array | None = None
    d: Array | None = None
    activation_saved: Array | None = None


@dataclass(frozen=True)
class BackwardAttributes:
    """The attributes of a backward, as in the forward."""

    config: BatchNormConfig
    is_training: bool
    implementation: Implementation


@dataclass(frozen=True)
class BackwardOutputs:
    """The gradients, None where the forward had no such input or variable.

    Attributes:
        inputs_gradient: T, the shape of the inputs.
        beta_gradient: V, shape [C].
        gamma_gradient: V, shape [C].
        batch_weights_gradient: The dtype and shape of batch_weights, if floating; likewise for the adjustment.
        beta_regularization_gradient: V, shape [C].
        gamma_regularization_gradient: V, shape [C].
    """

    inputs_gradient: Array
    beta_gradient: Array | None = None
    gamma_gradient: Array | None = None
    batch_weights_gradient: Array | None = None
    adjustment_scale_gradient: Array | None = None
    adjustment_bias_gradient: Array | None = None
    beta_regularization_gradient: Array | None = None
    gamma_regularization_gradient: Array | None = None


@dataclass(frozen=True)
class ForwardPlan:
    """A checked forward.

    Attributes:
        geometry: The geometry of the inputs.
        implementation: The implementation that TensorFlow would choose.
        variable_dtype: V.
        ignored: The arguments that have no effect.
        uses_weights: Whether the moments are weighted.
        uses_adjustment: Whether the normalised inputs are adjusted.
        has_updates: Whether the moving averages will be updated.
        output_specs: The specs of all large outputs.
    """

    geometry: Geometry
    implementation: Implementation
    variable_dtype: np.dtype[Any]
    ignored: tuple[IgnoredArgument, ...]
    uses_weights: bool
    uses_adjustment: bool
    has_updates: bool
    output_specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class BackwardPlan:
    """A checked backward."""

    geometry: Geometry
    output_specs: tuple[TensorSpec, ...]


def plan_forward(inputs: CallInputs, attributes: ForwardAttributes) -> ForwardPlan:
    """Checks a forward and plans it.

    Raises:
        InvalidArgumentError: An argument is invalid; the message names it, what was given and what was expected.
    """
    config, x = attributes.config, inputs.inputs
    check_dtype(x.dtype, "inputs")
    check_rank(x.shape, "inputs")
    geometry = geometry_of(x.shape, config.data_format)
    has_adjustment = inputs.adjustment_scale is not None
    kind = CallKind(
        rank=len(x.shape),
        dtype=x.dtype,
        is_training=attributes.is_training,
        has_batch_weights=inputs.batch_weights is not None,
        has_adjustment=has_adjustment or config.adjustment is not None,
    )
    implementation = choose_implementation(config, kind)
    if inputs.batch_weights is not None:
        _check_weights(inputs.batch_weights, x)
    _check_adjustment(inputs, x)
    return ForwardPlan(
        geometry=geometry,
        implementation=implementation,
        variable_dtype=implementation.variable_dtype(x.dtype),
        ignored=ignored_arguments(config, kind, implementation),
        uses_weights=kind.has_batch_weights and attributes.is_training,
        uses_adjustment=has_adjustment and attributes.is_training and implementation is not Implementation.LEGACY,
        has_updates=has_updates(config, kind, implementation) and geometry.count > 0,
        output_specs=_forward_specs(x, geometry, attributes),
    )


def plan_backward(inputs: BackwardInputs, attributes: BackwardAttributes) -> BackwardPlan:
    """Checks a backward and plans it.

    Raises:
        InvalidArgumentError: The gradient does not have the dtype and shape of the outputs.
    """
    x, dy = inputs.inputs, inputs.outputs_gradient
    if dy.dtype != x.dtype or tuple(dy.shape) != tuple(x.shape):
        raise InvalidArgumentError(
            f"expected the dtype and shape of the outputs, {x.dtype} {list(x.shape)}, got {dy.dtype} {list(dy.shape)}",
            field="outputs_gradient",
        )
    like = (x, inputs.beta, inputs.gamma, inputs.batch_weights, inputs.adjustment_scale, inputs.adjustment_bias)
    specs = tuple(TensorSpec(array.dtype, tuple(array.shape)) for array in like if array is not None)
    return BackwardPlan(geometry_of(x.shape, attributes.config.data_format), specs)


def check_dtype(dtype: np.dtype[Any], field: str) -> None:
    """Checks that inputs may have this dtype.

    Raises:
        InvalidArgumentError: They may not.
    """
    if dtype not in FLOATING:
        known = ", ".join(map(dtype_text, FLOATING))
        raise InvalidArgumentError(f"expected a dtype out of {known}, got {dtype_text(dtype)}", field=field)


def check_rank(shape: Sequence[int], field: str) -> None:
    """Checks that inputs may have this many dimensions.

    Raises:
        InvalidArgumentError: They may not.
    """
    if len(shape) not in _RANKS:
        given = f"shape {list(shape)}" if len(shape) <= MAX_ARRAY_DIMENSIONS else f"{len(shape)} dimensions"
        raise InvalidArgumentError(f"expected a rank from 2 to 5, got {given}", field=field)


def geometry_of(shape: Sequence[int], data_format: str) -> Geometry:
    """Returns the sizes before, of and after the axis of the channels."""
    axis = channel_axis(len(shape), data_format)
    return Geometry(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def channel_axis(rank: int, data_format: str) -> int:
    """Returns the axis of the channels."""
    return rank - 1 if data_format == "NHWC" else 1


def channel_shape(rank: int, data_format: str, channels: int) -> tuple[int, ...]:
    """Returns the shape in which per-channel values broadcast to the inputs."""
    return (channels, *[1] * (rank - 1 - channel_axis(rank, data_format)))


def _check_weights(weights: Array, x: Array) -> None:
    if weights.dtype not in FLOATING and weights.dtype.kind not in "biu":
        raise InvalidArgumentError(
            f"expected a floating dtype, integers or bool, got {dtype_text(weights.dtype)}", field="batch_weights"
        )
    if tuple(weights.shape) != (x.shape[0],):
        shapes = f"({x.shape[0]},) and {tuple(weights.shape)}"
        raise InvalidArgumentError(
            f"Shapes {shapes} are incompatible: expected batch_weights of shape [{x.shape[0]}], as there are "
            f"{x.shape[0]} items, got {list(weights.shape)}",
            field="batch_weights",
        )


def _check_adjustment(inputs: CallInputs, x: Array) -> None:
    given = {"adjustment_scale": inputs.adjustment_scale, "adjustment_bias": inputs.adjustment_bias}
    for name, array in given.items():
        if array is None:
            if any(other is not None for other in given.values()):
                raise InvalidArgumentError(
                    "expected both adjustment_scale and adjustment_bias, or none of them; got one", field=name
                )
            continue
        check_dtype(array.dtype, name)
        try:
            fits = np.broadcast_shapes(tuple(array.shape), tuple(x.shape)) == tuple(x.shape)
        except ValueError:
            fits = False
        if not fits:
            raise InvalidArgumentError(
                f"expected a shape that broadcasts to that of the inputs, {list(x.shape)}, got {list(array.shape)}",
                field=name,
            )


def _forward_specs(x: Array, geometry: Geometry, attributes: ForwardAttributes) -> tuple[TensorSpec, ...]:
    outputs = TensorSpec(x.dtype, tuple(x.shape))
    per_channel = TensorSpec(widened(x.dtype), (geometry.channels,))
    activation = attributes.config.activation_fn
    keeps_more = attributes.saves and activation and not gradient_of_result(activation)
    return (outputs, *[per_channel] * 6, *([outputs] if keeps_more else []))


def variables_for(
    config: BatchNormConfig, input_dtype: np.dtype[Any], input_shape: Sequence[int]
) -> tuple[int, np.dtype[Any]]:
    """Returns the number of channels and the dtype of the variables for such inputs.

    Args:
        config: The configuration of the layer.
        input_dtype: The dtype of the inputs.
        input_shape: The shape of the inputs, -1 for unknown sizes.

    Raises:
        InvalidArgumentError: The layer does not accept such inputs.
    """
    check_dtype(input_dtype, "input_dtype")
    check_rank(input_shape, "input_shape")
    if any(size < -1 for size in input_shape):
        raise InvalidArgumentError(
            f"expected sizes of at least 0, or -1 for any, got {list(input_shape)}", field="input_shape"
        )
    axis = channel_axis(len(input_shape), config.data_format)
    if input_shape[axis] < 0:
        raise InvalidArgumentError(
            f"expected the number of channels as size {axis} of input_shape, got {list(input_shape)}",
            field="input_shape",
        )
    kind = CallKind(len(input_shape), input_dtype, True, False, config.adjustment is not None)
    return input_shape[axis], choose_implementation(config, kind).variable_dtype(input_dtype)
