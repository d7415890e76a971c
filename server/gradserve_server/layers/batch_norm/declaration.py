"""The computations of a layer as ops, and the interface of their family."""

from typing import Protocol

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
)

BACKWARD = Op(
    name="BatchNormLayer.Backward",
    family=FAMILY,
    inputs=BackwardInputs,
    attributes=BackwardAttributes,
    outputs=BackwardOutputs,
    plan=plan_backward,
    compute=_backward,
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
