"""LayerNorm and LayerNormGrad as ops, and the interface of their family."""

from typing import Protocol

from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
    Plan,
    plan_forward,
    plan_gradient,
)
from gradserve_server.ops.operation import Family, Op


class LayerNorm(Family, Protocol):
    """The computations on one device. Inputs are checked and in its memory; outputs are allocated there."""

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes LayerNorm."""
        ...

    def gradient(self, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
        """Computes LayerNormGrad."""
        ...


FAMILY = "layer_norm"


def _forward(family: LayerNorm, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan.geometry)


def _gradient(family: LayerNorm, inputs: GradInputs, attributes: GradAttributes, plan: Plan) -> GradOutputs:
    return family.gradient(inputs, plan.geometry)


def _gradient_scratch_bytes(_inputs: GradInputs, _attributes: object, plan: Plan) -> int:
    """Returns a bound: the sums for scale and offset, in float64, of every 32 groups."""
    geometry = plan.geometry
    return 16 * geometry.size * -(-geometry.groups // 32)


LAYER_NORM = Op(
    name="LayerNorm",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
)

LAYER_NORM_GRAD = Op(
    name="LayerNormGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
    scratch_bytes=_gradient_scratch_bytes,
)
