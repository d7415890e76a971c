"""GRUBlockCell and GRUBlockCellGrad as ops, and their interface on a device."""

import math
from dataclasses import fields
from typing import Protocol

from gradserve_server.ops.dtypes import widened
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


def _partial_sums(sizes: Sizes) -> int:
    """Returns the elements of the sums that a batch of one is computed with: three for each cell and 128 rows."""
    return 3 * sizes.cells * (2 + (sizes.inputs + sizes.cells) // 128) if sizes.batch == 1 else 0


def _scratch_bytes(inputs: CellInputs, _attributes: object, plan: Plan) -> int:
    """Returns a bound for the host: products, before they are added up; and all in float32, if the op has 16 bits."""
    sizes, dtype = plan.sizes, inputs.x.dtype
    in_products = sizes.batch * (2 * sizes.inputs + 9 * sizes.cells) + _partial_sums(sizes)
    given = sum(math.prod(getattr(inputs, field.name).shape) for field in fields(inputs))
    results = sum(spec.num_bytes for spec in plan.output_specs) // dtype.itemsize
    in_float32 = 0 if dtype == widened(dtype) else given + results
    return widened(dtype).itemsize * (in_products + in_float32)


GRU_BLOCK_CELL = Op(
    name="GRUBlockCell",
    family=FAMILY,
    inputs=CellInputs,
    attributes=CellAttributes,
    outputs=CellOutputs,
    plan=plan_cell,
    compute=_cell,
    scratch_bytes=_scratch_bytes,
)

GRU_BLOCK_CELL_GRAD = Op(
    name="GRUBlockCellGrad",
    family=FAMILY,
    inputs=GradInputs,
    attributes=GradAttributes,
    outputs=GradOutputs,
    plan=plan_gradient,
    compute=_gradient,
    scratch_bytes=_scratch_bytes,
)
