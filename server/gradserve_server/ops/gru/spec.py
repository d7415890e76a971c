"""The ops GRUBlockCell and GRUBlockCellGrad: their inputs, attributes, outputs and checks, and their family.

T is the dtype of all tensors, B the batch, I the size of the input and H the size of the cell. The first I rows of
weights are for x, the last H for the state. The first half of w_ru's columns, and of everything of length 2H, is for
the reset gate r, the second for the update gate u. Messages, and the order of the checks, are TensorFlow's where it has
them.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.operation import Family, Op
from gradserve_server.tensors.spec import TensorSpec, check_type_attribute, dtype_text, widened


@dataclass(frozen=True)
class CellInputs:
    """Inputs of GRUBlockCell.

    Attributes:
        x: T, shape [B, I].
        h_prev: T, shape [B, H].
        w_ru: T, shape [I + H, 2H].
        w_c: T, shape [I + H, H].
        b_ru: T, shape [2H].
        b_c: T, shape [H].
    """

    x: Array
    h_prev: Array
    w_ru: Array
    w_c: Array
    b_ru: Array
    b_c: Array


@dataclass(frozen=True)
class CellAttributes:
    """GRUBlockCell has no attributes."""


@dataclass(frozen=True)
class CellOutputs:
    """Outputs of GRUBlockCell.

    Attributes:
        r: T, shape [B, H]: the reset gate.
        u: T, shape [B, H]: the update gate.
        c: T, shape [B, H]: the candidate state.
        h: T, shape [B, H]: the new state.
    """

    r: Array
    u: Array
    c: Array
    h: Array


@dataclass(frozen=True)
class GradInputs(CellInputs):
    """Inputs of GRUBlockCellGrad: the inputs and outputs of GRUBlockCell, and the gradient.

    Attributes:
        r: T, shape [B, H].
        u: T, shape [B, H].
        c: T, shape [B, H].
        d_h: T, shape [B, H]: the gradient with respect to h.
    """

    r: Array
    u: Array
    c: Array
    d_h: Array


@dataclass(frozen=True)
class GradAttributes:
    """Attributes of GRUBlockCellGrad.

    Attributes:
        weight_gradients: Whether to compute the gradients of weights and biases, too.
    """

    weight_gradients: bool = False


@dataclass(frozen=True)
class GradOutputs:
    """Outputs of GRUBlockCellGrad; the last four with `weight_gradients`.

    Attributes:
        d_x: T, shape [B, I].
        d_h_prev: T, shape [B, H].
        d_c_bar: T, shape [B, H]: the gradient with respect to the argument of tanh.
        d_r_bar_u_bar: T, shape [B, 2H]: the gradient with respect to the argument of the sigmoid.
        d_w_ru: T, shape [I + H, 2H].
        d_w_c: T, shape [I + H, H].
        d_b_ru: T, shape [2H].
        d_b_c: T, shape [H].
    """

    d_x: Array
    d_h_prev: Array
    d_c_bar: Array
    d_r_bar_u_bar: Array
    d_w_ru: Array | None = None
    d_w_c: Array | None = None
    d_b_ru: Array | None = None
    d_b_c: Array | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of a cell and its batch."""

    batch: int
    inputs: int
    cells: int


@dataclass(frozen=True)
class Plan:
    """A checked call.

    Attributes:
        sizes: The sizes of its tensors.
        output_specs: The specs of all outputs, in their order.
    """

    sizes: Sizes
    output_specs: tuple[TensorSpec, ...]


def plan_cell(inputs: CellInputs, attributes: CellAttributes) -> Plan:
    """Checks a call of GRUBlockCell.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_dtypes(inputs)
    sizes = _check_cell(inputs)
    state = TensorSpec(inputs.x.dtype, (sizes.batch, sizes.cells))
    return Plan(sizes, (state,) * 4)


def plan_gradient(inputs: GradInputs, attributes: GradAttributes) -> Plan:
    """Checks a call of GRUBlockCellGrad.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    _check_dtypes(inputs)
    sizes = _check_cell(inputs)
    for name in ("r", "u", "c", "d_h"):
        # For a wrong rank of c, TensorFlow's message has this name.
        _check_rank(inputs, name, 2, called="w_c" if name == "c" else name)
        _check_size(inputs, name, 0, sizes.batch, called=f"{name}.dims(0) != batch_size")
        _check_size(inputs, name, 1, sizes.cells, called=f"{name}.dims(1) != cell_size")
    like_inputs = (inputs.x, inputs.h_prev, inputs.c)
    shapes = [array.shape for array in like_inputs] + [(sizes.batch, 2 * sizes.cells)]
    if attributes.weight_gradients:
        shapes += [array.shape for array in (inputs.w_ru, inputs.w_c, inputs.b_ru, inputs.b_c)]
    return Plan(sizes, tuple(TensorSpec(inputs.x.dtype, tuple(shape)) for shape in shapes))


def _check_dtypes(inputs: CellInputs) -> None:
    """Checks the dtypes of all inputs before any shape, as TensorFlow does."""
    dtype = inputs.x.dtype
    check_type_attribute(dtype, "x")
    for field in fields(inputs):
        given = getattr(inputs, field.name).dtype
        if given != dtype:
            raise InvalidArgumentError(
                f"{field.name} must have the dtype of x, {dtype_text(dtype)}, got {dtype_text(given)}", field=field.name
            )


def _check_cell(inputs: CellInputs) -> Sizes:
    _check_rank(inputs, "x", 2)
    _check_rank(inputs, "h_prev", 2)
    sizes = Sizes(inputs.x.shape[0], inputs.x.shape[1], inputs.h_prev.shape[1])
    rows, columns = sizes.inputs + sizes.cells, sizes.cells
    _check_size(inputs, "h_prev", 0, sizes.batch, called="h_prev.dims(0) != batch_size")
    _check_rank(inputs, "w_ru", 2, called="w_ru_")
    _check_size(inputs, "w_ru", 0, rows, called="w_ru.dim_size(0) != input_size + cell_size")
    _check_size(inputs, "w_ru", 1, 2 * columns, called="w_ru.dim_size(1) != cell_size * 2")
    _check_rank(inputs, "w_c", 2)
    _check_size(inputs, "w_c", 0, rows, called="w_c.dim_size(0) != input_size + cell_size")
    _check_size(inputs, "w_c", 1, columns, called="w_c.dim_size(1) != cell_size")
    _check_rank(inputs, "b_ru", 1)
    _check_size(inputs, "b_ru", 0, 2 * columns, called="b_ru.dim_size(0) != cell_size * 2")
    _check_rank(inputs, "b_c", 1)
    _check_size(inputs, "b_c", 0, columns, called="b_c.dim_size(0) != cell_size")
    return sizes


def _check_rank(inputs: Any, name: str, rank: int, called: str | None = None) -> None:
    given = len(getattr(inputs, name).shape)
    if given != rank:
        raise InvalidArgumentError(f"Rank of {called or name} must be {rank}, got {given}", field=name)


def _check_size(inputs: Any, name: str, axis: int, expected: int, called: str) -> None:
    given = getattr(inputs, name).shape[axis]
    if given != expected:
        raise InvalidArgumentError(f"{called}: {given} vs. {expected}", field=name)


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
