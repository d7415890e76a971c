"""FusedBatchNorm and FusedBatchNormGrad as ops, and their interface on a device."""

from typing import Protocol, runtime_checkable

from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.spec import (
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


class BatchNorm(Family, Protocol):
    """FusedBatchNorm on one device. Inputs are checked and in its memory, where outputs are, too."""

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes FusedBatchNorm."""
        ...

    def gradient(self, inputs: GradInputs, attributes: GradAttributes, geometry: Geometry) -> GradOutputs:
        """Computes FusedBatchNormGrad."""
        ...


@runtime_checkable
class BatchNormRelu(BatchNorm, Protocol):
    """FusedBatchNorm with a relu behind it, in the same pass over memory, and its gradient. Not every device has it."""

    def forward_relu(self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
        """Computes FusedBatchNorm with max(y, 0) for y."""
        ...

    def gradient_relu(
        self, inputs: GradInputs, offset: Array, attributes: GradAttributes, geometry: Geometry
    ) -> GradOutputs:
        """Computes the gradients of `forward_relu`.

        It computes again from x where y was above 0, by the arithmetic of the forward call.

        Args:
            inputs: The inputs; `y_backprop` is the gradient with respect to max(y, 0).
            offset: U, shape [C]: the forward call's.
            attributes: See `gradient`.
            geometry: See `gradient`.
        """
        ...


FAMILY = "batch_norm"


def _forward(family: BatchNorm, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, attributes, plan.geometry)


def _gradient(family: BatchNorm, inputs: GradInputs, attributes: GradAttributes, plan: Plan) -> GradOutputs:
    return family.gradient(inputs, attributes, plan.geometry)


def kernel_scratch_bytes(geometry: Geometry) -> int:
    """Returns a bound: two sums in float64 for each column of every 128 rows, and a few values for each column.

    A row has an element of every channel, or more of them if these are few.
    """
    size = geometry.count * geometry.channels
    columns = max(geometry.channels * (geometry.inner if geometry.inner < _SHORT else 1), min(2 * 128, size))
    return size // 8 + 64 * columns


_SHORT = 16
"""Elements that lie together in memory are columns of a row if they are fewer."""


def _scratch_bytes(_inputs: object, _attributes: object, plan: Plan) -> int:
    return kernel_scratch_bytes(plan.geometry)


FUSED_BATCH_NORM = Op(
    name="FusedBatchNorm",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
    scratch_bytes=_scratch_bytes,
)

FUSED_BATCH_NORM_GRAD = Op(
    name="FusedBatchNormGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
    scratch_bytes=_scratch_bytes,
)
