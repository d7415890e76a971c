"""GRUBlockCell and GRUBlockCellGrad as ops, and their interface on a device."""

from typing import Protocol

from gradserve_server.ops.gru.spec import (
    CellAttributes,
    CellInputs,
    CellOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    Plan,
    Sizes,
    plan_cell,
    plan_gradient,
)
from gradserve_server.ops.operation import Family, Op


class GRU(Family, Protocol):
    """GRUBlockCell on one device. Inputs are checked and in its memory, where outputs are, too."""

    def cell(self, inputs: CellInputs, sizes: Sizes) -> CellOutputs:
        """Computes GRUBlockCell."""
        ...

    def gradient(self, inputs: GradInputs, attributes: GradAttributes, sizes: Sizes) -> GradOutputs:
        """Computes GRUBlockCellGrad."""
        ...


FAMILY = "gru"


def _cell(family: GRU, inputs: CellInputs, attributes: CellAttributes, plan: Plan) -> CellOutputs:
    return family.cell(inputs, plan.sizes)


def _gradient(family: GRU, inputs: GradInputs, attributes: GradAttributes, plan: Plan) -> GradOutputs:
    return family.gradient(inputs, attributes, plan.sizes)


GRU_BLOCK_CELL = Op(
    name="GRUBlockCell",
    family=FAMILY,
    inputs=CellInputs,
    attributes=CellAttributes,
    outputs=CellOutputs,
    plan=plan_cell,
    compute=_cell,
)

GRU_BLOCK_CELL_GRAD = Op(
    name="GRUBlockCellGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
)
