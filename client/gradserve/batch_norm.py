"""The arguments, results and warnings of batch normalization layers.

Tensors in results are NumPy arrays, or TensorHandles if the call was told to keep them on the server.

"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Generic

from numpy.typing import NDArray

from gradserve.results import TensorT_co
from gradserve_protocol.arrays import DType
from gradserve_protocol.printing import abbreviated


@dataclass(frozen=True)
class Initializer:
    """An initializer of a variable, by its name in TensorFlow.

    Parameters that are None take the server's defaults. A parameter that the named initializer does not have is
    refused.

    Attributes:
        name: "zeros", "ones", "constant", "uniform", "normal", "truncated_normal", "glorot" or "glorot_normal".
        value: The value of "constant"; 0 by default.
        minval: The lower bound of "uniform", included; 0 by default.
        maxval: The upper bound of "uniform", excluded; 1 by default.
        mean: The mean of "normal" and "truncated_normal"; 0 by default.
        stddev: The standard deviation of "normal" and "truncated_normal"; 1 by default.
        seed: The seed of the random initializers. The same seed gives the same values on every device, but not
            TensorFlow's. None: new values at each creation.
    """

    name: str
    _: KW_ONLY
    value: float | None = None
    minval: float | None = None
    maxval: float | None = None
    mean: float | None = None
    stddev: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Regularizer:
    """A regularizer of a variable, by its name in tf.contrib.layers.

    Attributes:
        name: "l1", "l2" or "l1_l2".
        l1: The factor of the sum of absolute values; 0 or more. "l1" needs it; 1 by default in "l1_l2".
        l2: The factor of half the sum of squares; 0 or more. "l2" needs it; 1 by default in "l1_l2".
    """

    name: str
    _: KW_ONLY
    l1: float | None = None
    l2: float | None = None


@dataclass(frozen=True)
class RandomAdjustment:
    """An adjustment drawn at random for each channel of each forward in training.

    Attributes:
        scale: The range of the scale: (low, high), low included, high excluded.
        bias: The range of the bias, likewise.
        seed: The seed that determines a layer's n-th draw. None: a random seed.
    """

    scale: tuple[float, float]
    bias: tuple[float, float]
    seed: int | None = None


class IgnoredArgumentWarning(UserWarning):
    """Warns that an argument of a layer or a raw op has no effect. TensorFlow ignores such arguments silently."""


class BatchNormImplementation(Enum):
    """The implementation in TensorFlow that a forward follows; docs/batch_norm_arguments.md says which one when."""

    FUSED = "FUSED"
    """FusedBatchNorm. Variables are float32; the moving variance is updated with Bessel's correction."""
    CORE_FUSED = "CORE_FUSED"
    """The layer of tf.layers, fused. Otherwise like FUSED."""
    CORE = "CORE"
    """The layer of tf.layers, not fused. Variables are float32, or float64 if the inputs are; the moving variance is
    updated with the population variance."""
    LEGACY = "LEGACY"
    """Plain operations. Variables have the dtype of the inputs; the moving variance is updated with the population
    variance, weighted if there are weights; regularizers and adjustment are ignored."""


@dataclass(frozen=True)
class IgnoredArgument:
    """An argument that has no effect.

    Attributes:
        argument: The argument's name, such as "fused" or "param_regularizers[beta]".
        reason: The reason, in words.
    """

    argument: str
    reason: str


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class BatchNormForward(Generic[TensorT_co]):
    """A forward: one pass of inputs through a layer.

    Attributes:
        outputs: The outputs, of the dtype and shape of the inputs.
        forward_id: The forward's name on the server; None if no gradients can be computed and no updates wait.
        has_pending_updates: Whether its updates of the moving averages wait for `run_updates`.
        implementation: The implementation that computed it.
        regularization_losses: The loss of each variable with a regularizer, for the value that the forward used.
        drawn_adjustment: The (scale, bias) drawn by a RandomAdjustment, each of a shape that broadcasts to the outputs:
            [C], or with "NCHW" [C, 1, ...] with a 1 for each axis after the channels. None without a RandomAdjustment.
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
    """Gradients with respect to everything that a forward was computed from; None for what it did not have.

    Attributes:
        inputs: The gradient of the inputs, of their dtype and shape.
        beta: The gradient of beta: shape [C], the dtype of the variable, without its regularizer's part.
        gamma: The gradient of gamma, likewise.
        batch_weights: The gradient of batch_weights: shape [N], their dtype.
        adjustment_scale: The gradient of the adjustment's scale, given or drawn, of its dtype and shape.
        adjustment_bias: The gradient of the adjustment's bias, likewise.
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
        dtype: The element type.
        shape: The shape.
        trainable: Whether it is listed as trainable: beta and gamma are, unless the layer was made with
            trainable=False.
        collections: The names of its collections.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    trainable: bool
    collections: tuple[str, ...]


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class BatchNormLayerInfo:
    """The state of a layer at one moment.

    Attributes:
        container: The namespace of its name.
        name: Its name.
        arguments: The arguments of `Client.batch_norm` that it was made with, by name, including defaults and drawn
            seeds: all but reuse, scope, container, input_shape and dtype. A DenseSpec stands for an array.
        variables: Its variables; empty until the first forward, unless it was created with a dtype and input_shape.
        num_forwards: The number of forwards whose gradients can still be computed, or whose updates have not been run.
        num_updates: The number of updates of the moving averages.
        num_bytes: The memory of the variables, of arrays among the arguments, and of what forwards keep.
        warnings: Arguments that have no effect in any call.
        is_private: Whether it is private to the client that made it, and deleted with it.
        idle_lease: Seconds without use after which it is deleted; None: never.
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
