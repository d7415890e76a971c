"""The computations of a layer on a device: the kernels of FusedBatchNorm, and arithmetic on per-channel values.

With xhat = (x - mean) / s and s = sqrt(variance + epsilon), every implementation of the layer gives

    y = activation(((xhat r + d) a + b) gamma + beta)

where r and d are the correction of renorm (else 1 and 0) and a and b the adjustment (else 1 and 0). If all of these
are per-channel values, this is FusedBatchNorm with another scale and offset, and so are its gradients. A relu is
computed by the same kernel if the device can; nothing is then saved for its gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array, Device
from gradserve_server.layers.batch_norm.averages import MovingAverages
from gradserve_server.layers.batch_norm.backward_pass import BackwardPass
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.forward_pass import ForwardPass, Normalized
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.preparation import small_calls
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
)
from gradserve_server.layers.batch_norm.updates import UpdateAttributes, UpdateInputs, update
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.ops.activation.spec import Activation, gradient_of_result
from gradserve_server.ops.batch_norm.spec import BatchNorm


class LayerComputation:
    """Computes layers on the device of its parts. Safe to use from several threads."""

    def __init__(self, device: Device, xp: Any, batch_norm: BatchNorm, activation: Activation) -> None:
        """Takes the device's `xp`, NumPy or CuPy, and its families of ops."""
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


def _regularizers(
    config: BatchNormConfig, implementation: Implementation
) -> tuple[Regularizer | None, Regularizer | None]:
    """Returns the regularizers of beta and gamma, None where one has no effect."""
    if implementation is Implementation.LEGACY:
        return None, None
    return config.regularizer_of("beta"), config.regularizer_of("gamma")
