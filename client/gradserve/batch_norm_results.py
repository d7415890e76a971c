"""What the calls of a batch normalization layer return, and what they warn of.

Tensors are NumPy arrays, or TensorHandles where the call was told to keep them on the server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic

from numpy.typing import NDArray

from gradserve.abbreviation import abbreviated
from gradserve.results import TensorT_co
from gradserve.wire.dtypes import DType


class IgnoredArgumentWarning(UserWarning):
    """An argument of a layer or a raw op has no effect; TensorFlow ignores it silently."""


class BatchNormImplementation(Enum):
    """The implementation of TensorFlow that a forward was computed by; docs/batch_norm_layer.md has the rule."""

    FUSED = "FUSED"
    """FusedBatchNorm. Variables are float32; the moving variance is fed with Bessel's correction."""
    CORE_FUSED = "CORE_FUSED"
    """The layer of tf.layers, fused: as FUSED."""
    CORE = "CORE"
    """The layer of tf.layers, not fused. Variables are float32, or float64 as the inputs; the moving variance is fed
    with the population variance."""
    LEGACY = "LEGACY"
    """Plain operations. Variables have the dtype of the inputs; the moving variance is fed with the population, or
    weighted, variance; regularizers and adjustment are ignored."""


@dataclass(frozen=True)
class IgnoredArgument:
    """An argument that has no effect.

    Attributes:
        argument: Its name, such as "fused" or "param_regularizers[beta]".
        reason: Why, in words.
    """

    argument: str
    reason: str


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class BatchNormForward(Generic[TensorT_co]):
    """A forward of a layer.

    Attributes:
        outputs: The dtype and shape of the inputs.
        forward_id: Its name on the server; None when nothing is left to do for it.
        has_pending_updates: Its moving averages' updates wait for `run_updates`.
        implementation: What computed it.
        regularization_losses: By variable, as far as it has a regularizer; of its value in this forward.
        drawn_adjustment: The (scale, bias) that a RandomAdjustment gave, each of a shape that broadcasts to that of the
            outputs: [C], with "NCHW" [C, 1, ...] with a 1 for each axis after the channels. None without one.
        warnings: Arguments that had no effect.
    """

    outputs: TensorT_co
    forward_id: str | None
    has_pending_updates: bool
    implementation: BatchNormImplementation
    regularization_losses: Mapping[str, float]
    drawn_adjustment: tuple[NDArray[Any], NDArray[Any]] | None
    warnings: tuple[IgnoredArgument, ...]


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class BatchNormGradients(Generic[TensorT_co]):
    """Gradients with respect to all that a forward was computed from; None where it had no such thing.

    Attributes:
        inputs: The dtype and shape of the inputs.
        beta: Shape [C], the dtype of the variable, without its regularizer's part.
        gamma: As `beta`.
        batch_weights: Shape [N], the dtype of batch_weights.
        adjustment_scale: The shape and dtype of the adjustment's scale, given or drawn.
        adjustment_bias: As `adjustment_scale`.
        regularization: Gradients of the regularization losses by variable, shape [C]; empty without regularizers.
    """

    inputs: TensorT_co
    beta: TensorT_co | None
    gamma: TensorT_co | None
    batch_weights: TensorT_co | None
    adjustment_scale: TensorT_co | None
    adjustment_bias: TensorT_co | None
    regularization: Mapping[str, TensorT_co]


@abbreviated
@dataclass(frozen=True, repr=False)
class VariableInfo:
    """A variable of a layer, without its value.

    Attributes:
        name: "beta", "gamma", "moving_mean", "moving_variance", ...
        dtype: Element type.
        shape: Sizes.
        trainable: Whether it is listed so: beta and gamma, unless the layer was made with trainable=False.
        collections: Its tags.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    trainable: bool
    collections: tuple[str, ...]


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class BatchNormLayerInfo:
    """A layer at one moment.

    Attributes:
        container: Its namespace.
        name: Its name.
        arguments: Those of `Client.batch_norm` that it was made with, by name, defaults and drawn seeds included:
            all but reuse, scope, container, input_shape and dtype. A DenseSpec is in the place of an array.
        variables: Empty until the first forward, unless it was created with a dtype and input_shape.
        num_forwards: Forwards whose gradients can still be computed, or whose updates have not been run.
        num_updates: Times that the moving averages were updated.
        num_bytes: Memory of the variables, of arrays among the arguments, and of what forwards keep.
        warnings: Arguments that have no effect whatever the call.
        is_private: It ends with the client that made it.
        idle_lease: Seconds without use after which it ends; None: it does not.
    """

    container: str
    name: str
    arguments: Mapping[str, Any] = field(repr=False)
    variables: tuple[VariableInfo, ...]
    num_forwards: int
    num_updates: int
    num_bytes: int
    warnings: tuple[IgnoredArgument, ...]
    is_private: bool
    idle_lease: float | None
