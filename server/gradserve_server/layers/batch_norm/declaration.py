"""The computations of a layer as ops, and the interface of their family."""

import math
from typing import Protocol

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.averages import MovingAverages
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    plan_backward,
    plan_forward,
)
from gradserve_server.layers.batch_norm.updates import (
    UpdateAttributes,
    UpdateInputs,
    UpdatePlan,
    plan_update,
)
from gradserve_server.ops.batch_norm.spec import Geometry, kernel_scratch_bytes
from gradserve_server.ops.dtypes import widened
from gradserve_server.ops.operation import Family, Op


class BatchNormLayerComputation(Family, Protocol):
    """The computations on one device. Inputs are checked and in its memory; outputs are allocated there."""

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan) -> ForwardOutputs:
        """Computes the outputs and what the gradient needs."""
        ...

    def backward(self, inputs: BackwardInputs, attributes: BackwardAttributes, plan: BackwardPlan) -> BackwardOutputs:
        """Computes the gradients."""
        ...

    def update(self, inputs: UpdateInputs, attributes: UpdateAttributes) -> MovingAverages:
        """Computes the next values of the moving averages."""
        ...


FAMILY = "batch_norm_layer"

_COPIES = 7
"""The most arrays of the size of the inputs, besides the outputs, where NumPy or CuPy computes what kernels do not."""


def _forward_scratch_bytes(inputs: ForwardInputs, _attributes: ForwardAttributes, plan: ForwardPlan) -> int:
    """Returns a bound: what FusedBatchNorm takes; copies, with weights or an adjustment; and one for an activation."""
    copies = _COPIES if plan.uses_weights or plan.uses_adjustment else 1
    return _scratch_bytes(inputs.inputs, plan.geometry, copies)


def _backward_scratch_bytes(inputs: BackwardInputs, _attributes: BackwardAttributes, plan: BackwardPlan) -> int:
    """Returns a bound: like that of the forward."""
    is_plain = inputs.batch_weights is None and inputs.adjustment_scale is None
    return _scratch_bytes(inputs.inputs, plan.geometry, 1 if is_plain else _COPIES)


def _scratch_bytes(x: Array, geometry: Geometry, copies: int) -> int:
    num_bytes: int = math.prod(x.shape) * widened(x.dtype).itemsize * copies
    return num_bytes + kernel_scratch_bytes(geometry)


def _forward(
    family: BatchNormLayerComputation, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan
) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan)


def _backward(
    family: BatchNormLayerComputation, inputs: BackwardInputs, attributes: BackwardAttributes, plan: BackwardPlan
) -> BackwardOutputs:
    return family.backward(inputs, attributes, plan)


def _update(
    family: BatchNormLayerComputation, inputs: UpdateInputs, attributes: UpdateAttributes, plan: UpdatePlan
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
