"""The computations of a layer on a device: the kernels of FusedBatchNorm, and arithmetic on per-channel values.

With xhat = (x - mean) / s and s = sqrt(variance + epsilon), every implementation of the layer gives

    y = activation(((xhat r + d) a + b) gamma + beta)

where r and d are the correction of renorm (else 1 and 0) and a and b the adjustment (else 1 and 0). If all of these
are per-channel values, this is FusedBatchNorm with another scale and offset, and so are its gradients. A relu is
computed by the same kernel if the device can; nothing is then saved for its gradient.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array, CpuDevice, Device
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.events import Saved
from gradserve_server.layers.batch_norm.passes import BackwardPass, ForwardPass, Normalized
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    CallInputs,
    CallKind,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    Implementation,
    choose_implementation,
    plan_backward,
    plan_forward,
)
from gradserve_server.layers.batch_norm.variables import MovingAverages, initial_variables, variables_of
from gradserve_server.layers.variables import Regularizer
from gradserve_server.ops.activation import spec as activation_ops
from gradserve_server.ops.activation.spec import Activation, gradient_of_result
from gradserve_server.ops.batch_norm import spec as batch_norm_ops
from gradserve_server.ops.batch_norm.spec import BatchNorm, Geometry, kernel_scratch_bytes
from gradserve_server.ops.operation import Family, Op
from gradserve_server.tensors.spec import FLOATING, TensorSpec, widened

FAMILY = "batch_norm_layer"

_COPIES = 7
"""The most arrays of the size of the inputs, besides the outputs, where NumPy or CuPy computes what kernels do not."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateInputs(MovingAverages):
    """The moving averages, and the moments of the batch, each of shape [C], to update them with."""

    batch_mean: Array
    batch_variance: Array

    @classmethod
    def of(cls, averages: MovingAverages, batch_mean: Array, batch_variance: Array) -> "UpdateInputs":
        """Returns the averages together with the moments."""
        return cls(**vars(averages), batch_mean=batch_mean, batch_variance=batch_variance)


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
    """The plan of an update, for which there is nothing to check."""

    output_specs: tuple[TensorSpec, ...]


def plan_update(inputs: UpdateInputs, attributes: UpdateAttributes) -> UpdatePlan:
    """Returns the specs of the outputs."""
    return UpdatePlan(tuple(TensorSpec(array.dtype, tuple(array.shape)) for array in inputs.by_name().values()))


def _forward_scratch_bytes(inputs: ForwardInputs, _attributes: ForwardAttributes, plan: ForwardPlan) -> int:
    """Returns a bound: that of FusedBatchNorm, copies if there are weights or an adjustment, and an activation."""
    copies = _COPIES if plan.uses_weights or plan.uses_adjustment else 1
    return _scratch_bytes(inputs.inputs, plan.geometry, copies)


def _backward_scratch_bytes(inputs: BackwardInputs, _attributes: BackwardAttributes, plan: BackwardPlan) -> int:
    """Returns a bound: like that of the forward."""
    is_plain = inputs.batch_weights is None and inputs.adjustment_scale is None
    return _scratch_bytes(inputs.inputs, plan.geometry, 1 if is_plain else _COPIES)


def _scratch_bytes(x: Array, geometry: Geometry, copies: int) -> int:
    num_bytes: int = math.prod(x.shape) * widened(x.dtype).itemsize * copies
    return num_bytes + kernel_scratch_bytes(geometry)


class LayerComputation:
    """Computes forwards, backwards and updates on one device. Safe to use from several threads."""

    def __init__(self, device: Device, xp: Any, batch_norm: BatchNorm, activation: Activation) -> None:
        """Computes with `xp`, NumPy or CuPy, and with the device's families of ops."""
        self._device = device
        self._xp = xp
        self._batch_norm = batch_norm
        self._activation = activation

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Makes CuPy compile its arithmetic; ends early, between two calls, once `stop()` is true."""
        if self._xp is np:  # NumPy has nothing to compile
            return
        for call in small_calls():
            if stop():
                return
            call.compute(self._device, self)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan) -> ForwardOutputs:
        """Computes the outputs, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        with np.errstate(all="ignore"):
            normalized = ForwardPass(self._xp, self._batch_norm, inputs, attributes, plan).normalized()
            outputs, activation_saved = self._activated(normalized, attributes)
            batch_mean, batch_variance = normalized.batch or (None, None)
            of_beta, of_gamma = _regularizers(attributes.config, plan.implementation)
            given = ForwardOutputs(
                outputs,
                batch_mean,
                batch_variance,
                beta_regularization_loss=self._loss(of_beta, inputs.beta),
                gamma_regularization_loss=self._loss(of_gamma, inputs.gamma),
            )
        if not attributes.saves:
            return given
        return replace(
            given,
            mean=normalized.mean,
            variance=normalized.variance,
            r=normalized.r,
            d=normalized.d,
            activation_saved=activation_saved,
        )

    def backward(self, inputs: BackwardInputs, attributes: BackwardAttributes, plan: BackwardPlan) -> BackwardOutputs:
        """Computes the gradients, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        with np.errstate(all="ignore"):
            dy = inputs.outputs_gradient
            if inputs.activation_saved is not None:
                dy = self._device.empty(dy.shape, dy.dtype)
                name = attributes.config.activation_fn
                self._activation.gradient(name, inputs.outputs_gradient, inputs.activation_saved, dy)
            gradients = BackwardPass(self._xp, self._batch_norm, inputs, attributes, plan).gradients(dy)
            of_beta, of_gamma = _regularizers(attributes.config, attributes.implementation)
            return replace(
                gradients,
                beta_regularization_gradient=None if of_beta is None else of_beta.gradient(self._xp, inputs.beta),
                gamma_regularization_gradient=None if of_gamma is None else of_gamma.gradient(self._xp, inputs.gamma),
            )

    def update(self, inputs: UpdateInputs, attributes: UpdateAttributes) -> MovingAverages:
        """Computes the next values of the moving averages."""
        with np.errstate(all="ignore"):
            return update(self._xp, inputs, attributes)

    def _loss(self, regularizer: Regularizer | None, variable: Array) -> Array | None:
        return None if regularizer is None else self._xp.asarray(regularizer.loss(self._xp, variable))

    def _activated(self, normalized: Normalized, attributes: ForwardAttributes) -> tuple[Array, Array | None]:
        """Returns the outputs, and the argument of the gradient of the activation."""
        y, name = normalized.y, attributes.config.activation_fn
        if not name or normalized.is_activated:
            return y, None
        if gradient_of_result(name) or not attributes.saves:
            self._activation.forward(name, y, y)
            return y, y
        outputs = self._device.empty(y.shape, y.dtype)
        self._activation.forward(name, y, outputs)
        return outputs, y


def _forward(
    family: "LayerComputation", inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan
) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan)


def _backward(
    family: "LayerComputation", inputs: BackwardInputs, attributes: BackwardAttributes, plan: BackwardPlan
) -> BackwardOutputs:
    return family.backward(inputs, attributes, plan)


def _update(
    family: "LayerComputation", inputs: UpdateInputs, attributes: UpdateAttributes, plan: UpdatePlan
) -> MovingAverages:
    return family.update(inputs, attributes)


FORWARD = Op(
    name="BatchNormLayer.Forward",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
    scratch_bytes=_forward_scratch_bytes,
)

BACKWARD = Op(
    name="BatchNormLayer.Backward",
    family=FAMILY,
    inputs=BackwardInputs,
    attributes=BackwardAttributes,
    outputs=BackwardOutputs,
    plan=plan_backward,
    compute=_backward,
    scratch_bytes=_backward_scratch_bytes,
)

UPDATE = Op(
    name="BatchNormLayer.Update",
    family=FAMILY,
    inputs=UpdateInputs,
    attributes=UpdateAttributes,
    outputs=MovingAverages,
    plan=plan_update,
    compute=_update,
)


def make_layer_families(device: Device, ops: Mapping[str, Family]) -> Mapping[str, Family]:
    """Returns the families of layers on a device, by name; `ops` are its families of ops."""
    xp: Any = np
    if not isinstance(device, CpuDevice):
        import cupy

        xp = cupy
    batch_norm, activation = cast(BatchNorm, ops[batch_norm_ops.FAMILY]), cast(Activation, ops[activation_ops.FAMILY])
    return {FAMILY: LayerComputation(device, xp, batch_norm, activation)}


def _regularizers(
    config: BatchNormConfig, implementation: Implementation
) -> tuple[Regularizer | None, Regularizer | None]:
    """Returns the regularizers of beta and gamma, None where one has no effect."""
    if implementation is Implementation.LEGACY:
        return None, None
    return config.regularizer_of("beta"), config.regularizer_of("gamma")


def update(xp: Any, inputs: UpdateInputs, attributes: UpdateAttributes) -> MovingAverages:
    """Returns the next moving averages, computed in the dtype of the variables; `xp` is NumPy or CuPy.

    As in TensorFlow's `moving_averages.py` or, with renorm, in its layer: each average moves by 1 - decay of the way
    to the batch's value, and 16-bit variables round at every step. The zero-debiased mean is the biased one divided by
    1 - decay^local_step.
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


_SIZE = 3
"""The size of every dimension: CuPy's kernels depend on how many dimensions have more than one element."""
_REGULARIZER = Regularizer("l1_l2", {})
_CLIPPING = {"rmin": 0.5, "rmax": 2.0, "dmax": 1.0}


@dataclass(frozen=True)
class SmallCall:
    """A training forward of inputs [3, 3, 3, 3], its backward and its update.

    Attributes:
        adjustment: The shape of scale and bias; None for no adjustment.
    """

    config: BatchNormConfig
    dtype: np.dtype[Any]
    has_weights: bool = False
    adjustment: tuple[int, ...] | None = None

    @property
    def exists(self) -> bool:
        """True if the implementation takes the dtype, and not in the same way as a wider one."""
        kind = CallKind(4, self.dtype, True, self.has_weights, self.adjustment is not None)
        implementation = choose_implementation(self.config, kind)
        return self.dtype == widened(self.dtype) or self.has_weights or implementation is Implementation.LEGACY

    def compute(self, device: Device, computation: "LayerComputation") -> None:
        """Computes the call and waits for the results."""

        def put(array: NDArray[Any] | None) -> Array | None:
            return None if array is None else device.from_host(array)

        with device.computing():
            weights = np.ones(_SIZE, np.float32) if self.has_weights else None
            part = None if self.adjustment is None else np.ones(self.adjustment, widened(self.dtype))
            x = device.from_host(np.ones((_SIZE,) * 4, self.dtype))
            given = CallInputs(x, put(weights), put(part), put(part))
            attributes = ForwardAttributes(self.config)
            plan = plan_forward(given, attributes)
            initial = initial_variables(self.config, _SIZE, plan.variable_dtype)
            variables = variables_of({name: device.from_host(array) for name, array in initial.by_name().items()})
            inputs = ForwardInputs.of(given, variables)
            outputs = computation.forward(inputs, attributes, plan)
            saved = Saved.of(inputs, outputs, plan, is_training=True)
            backward, backward_attributes = saved.backward_inputs(x), saved.backward_attributes(self.config)
            computation.backward(backward, backward_attributes, plan_backward(backward, backward_attributes))
            update = UpdateInputs.of(variables.averages, outputs.batch_mean, outputs.batch_variance)
            computation.update(update, UpdateAttributes(self.config, plan.implementation))


def small_calls() -> Iterator[SmallCall]:
    """Yields small calls of every kind, common ones first, which make a GPU compile what layers need.

    Besides the kernels of other families this is CuPy's arithmetic, which is compiled at first use. A first call can
    take seconds, but only once for each kind of GPU: CuPy keeps the results on disk.
    """
    regularizers = {"beta": _REGULARIZER, "gamma": _REGULARIZER}
    plain = BatchNormConfig(scale=True, fused=False, param_regularizers=regularizers)
    zero_debias = BatchNormConfig(scale=True, fused=False, zero_debias_moving_mean=True)
    renorm = BatchNormConfig(scale=True, renorm=True, renorm_clipping=_CLIPPING)
    old_renorm = BatchNormConfig(scale=True, renorm=True, renorm_clipping=_CLIPPING, renorm_zero_debias=True)
    # The axis of the channels matters only for weights and adjustments.
    adjusted = [BatchNormConfig(scale=True, data_format=data_format) for data_format in ("NHWC", "NCHW")]
    shapes = ((_SIZE,), (_SIZE, 1, 1, 1), (_SIZE,) * 4)
    for dtype in sorted(FLOATING, key=lambda dtype: dtype != np.float32):
        calls = [SmallCall(config, dtype) for config in (plain, zero_debias, renorm, old_renorm)]
        calls += [SmallCall(config, dtype, has_weights=True) for config in adjusted]
        calls += [SmallCall(config, dtype, adjustment=shape) for config in adjusted for shape in shapes]
        yield from (call for call in calls if call.exists)
