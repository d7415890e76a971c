"""The updates of the moving averages.

They are computed in the dtype of the variables, as in TensorFlow: 16-bit variables round at every step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.averages import MovingAverages
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.tensors.spec import TensorSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateInputs(MovingAverages):
    """The moving averages, and the moments of the batch, each of shape [C], to update them with."""

    batch_mean: Array
    batch_variance: Array

    @classmethod
    def of(cls, averages: MovingAverages, batch_mean: Array, batch_variance: Array) -> "UpdateInputs":
        """Returns the averages together with the moments."""
        return cls(
            moving_mean=averages.moving_mean,
            moving_variance=averages.moving_variance,
            biased=averages.biased,
            local_step=averages.local_step,
            moving_stddev=averages.moving_stddev,
            renorm_mean=averages.renorm_mean,
            renorm_stddev=averages.renorm_stddev,
            renorm_mean_weight=averages.renorm_mean_weight,
            renorm_stddev_weight=averages.renorm_stddev_weight,
            batch_mean=batch_mean,
            batch_variance=batch_variance,
        )


@dataclass(frozen=True)
class UpdateAttributes:
    """The attributes of an update; `implementation` is the forward's."""

    config: BatchNormConfig
    implementation: Implementation

    @property
    def rate(self) -> np.float32:
        """1 - decay, rounded to float32 for variables of any dtype. CORE_FUSED rounds decay, too."""
        if self.implementation is Implementation.CORE_FUSED:
            return np.float32(1) - np.float32(self.config.decay)
        return np.float32(1 - self.config.decay)


@dataclass(frozen=True)
class UpdatePlan:
    """The plan of an update, which has nothing to check."""

    output_specs: tuple[TensorSpec, ...]


def plan_update(inputs: UpdateInputs, attributes: UpdateAttributes) -> UpdatePlan:
    """Returns the specs of the outputs."""
    return UpdatePlan(tuple(TensorSpec(array.dtype, tuple(array.shape)) for array in inputs.by_name().values()))


def update(xp: Any, inputs: UpdateInputs, attributes: UpdateAttributes) -> MovingAverages:
    """Returns the next moving averages; `xp` is NumPy or CuPy.

    As in TensorFlow's `moving_averages.py` or, with renorm, in its layer: each average moves by 1 - decay of the way
    to the batch's value. The zero-debiased mean is the biased one divided by 1 - decay^local_step.
    """
    dtype = inputs.moving_mean.dtype
    mean, variance = inputs.batch_mean.astype(dtype), inputs.batch_variance.astype(dtype)
    averaging = _Averaging(dtype.type(attributes.rate))
    if attributes.config.renorm:
        return _renorm(xp, inputs, attributes.config, averaging, mean, variance)
    moving_variance = averaging.step(inputs.moving_variance, variance)
    if inputs.biased is None:
        return MovingAverages(moving_mean=averaging.step(inputs.moving_mean, mean), moving_variance=moving_variance)
    biased = averaging.step(inputs.biased, mean)
    local_step = inputs.local_step + dtype.type(1)
    # In float64: powers in float32 are not equally accurate everywhere, and the error is magnified here.
    kept = float(dtype.type(1) - averaging.rate)
    corrected = biased / (1 - xp.power(kept, local_step.astype("float64"))).astype(dtype)
    return MovingAverages(
        moving_mean=corrected.astype(dtype),
        moving_variance=moving_variance,
        biased=biased,
        local_step=_as_array(xp, local_step, dtype),
    )


@dataclass(frozen=True)
class _Averaging:
    """A step of averages by `rate` of the way; `rate` has their dtype."""

    rate: Any

    def step(self, average: Array, value: Array) -> Array:
        return average - (average - value) * self.rate


def _renorm(
    xp: Any, inputs: UpdateInputs, config: BatchNormConfig, moving: _Averaging, mean: Array, variance: Array
) -> MovingAverages:
    dtype = inputs.moving_mean.dtype
    epsilon = dtype.type(config.epsilon)
    stddev = xp.sqrt(variance + epsilon)
    renorm = _Averaging(dtype.type(np.float32(1 - config.renorm_decay)))
    renorm_mean = renorm.step(inputs.renorm_mean, mean)
    renorm_stddev = renorm.step(inputs.renorm_stddev, stddev)
    if inputs.moving_stddev is not None:
        moving_stddev = moving.step(inputs.moving_stddev, stddev)
        return MovingAverages(
            moving_mean=moving.step(inputs.moving_mean, mean),
            moving_variance=xp.maximum(moving_stddev * moving_stddev - epsilon, dtype.type(0)),
            moving_stddev=moving_stddev,
            renorm_mean=renorm_mean,
            renorm_stddev=renorm_stddev,
        )
    mean_weight = renorm.step(inputs.renorm_mean_weight, dtype.type(1))
    stddev_weight = renorm.step(inputs.renorm_stddev_weight, dtype.type(1))
    new_stddev = renorm_stddev / stddev_weight
    return MovingAverages(
        moving_mean=moving.step(inputs.moving_mean, renorm_mean / mean_weight),
        moving_variance=moving.step(inputs.moving_variance, new_stddev * new_stddev - epsilon),
        renorm_mean=renorm_mean,
        renorm_mean_weight=_as_array(xp, mean_weight, dtype),
        renorm_stddev=renorm_stddev,
        renorm_stddev_weight=_as_array(xp, stddev_weight, dtype),
    )


def _as_array(xp: Any, scalar: Array, dtype: np.dtype[Any]) -> Array:
    """Returns an array of a scalar: NumPy returns plain numbers for results without dimensions."""
    return xp.asarray(scalar, dtype)
