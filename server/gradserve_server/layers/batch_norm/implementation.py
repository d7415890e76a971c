"""The choice between TensorFlow's implementations of the layer, and its consequences."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument
from gradserve_server.ops.dtypes import FLOAT32, FLOAT64, widened


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
