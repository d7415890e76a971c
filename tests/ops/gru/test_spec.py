"""What GRUBlockCell and GRUBlockCellGrad refuse, in TensorFlow's words and order, and what they take."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.gru.spec import (
    CellAttributes,
    CellInputs,
    GradAttributes,
    GradInputs,
    Plan,
    Sizes,
    plan_cell,
    plan_gradient,
)
from tests.golden.gru_block_cell_errors import Refusal, load_refusals


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def cell_inputs(batch: int, inputs: int, cells: int, dtype: Any = np.float32) -> CellInputs:
    shapes = [(batch, inputs), (batch, cells), (inputs + cells, 2 * cells), (inputs + cells, cells)]
    return CellInputs(*(zeros(*shape, dtype=dtype) for shape in (*shapes, (2 * cells,), (cells,))))


def gradient_inputs(batch: int, inputs: int, cells: int, dtype: Any = np.float32) -> GradInputs:
    state = zeros(batch, cells, dtype=dtype)
    return GradInputs(**vars(cell_inputs(batch, inputs, cells, dtype)), r=state, u=state, c=state, d_h=state)


CELL, GRADIENT = cell_inputs(2, 3, 4), gradient_inputs(2, 3, 4)
TYPES = "half, bfloat16, float, double"


def plan(inputs: CellInputs | GradInputs) -> Plan:
    if isinstance(inputs, GradInputs):
        return plan_gradient(inputs, GradAttributes())
    return plan_cell(inputs, CellAttributes())


def refusal_of(inputs: CellInputs | GradInputs) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as raised:
        plan(inputs)
    return raised.value


SHAPES: list[tuple[str, tuple[int, ...], str]] = [
    ("x", (3,), "Rank of x must be 2, got 1"),
    ("x", (), "Rank of x must be 2, got 0"),
    ("h_prev", (2, 4, 1), "Rank of h_prev must be 2, got 3"),
    ("h_prev", (3, 4), "h_prev.dims(0) != batch_size: 3 vs. 2"),
    ("w_ru", (8,), "Rank of w_ru_ must be 2, got 1"),
    ("w_ru", (8, 8), "w_ru.dim_size(0) != input_size + cell_size: 8 vs. 7"),
    ("w_ru", (7, 9), "w_ru.dim_size(1) != cell_size * 2: 9 vs. 8"),
    ("w_c", (7, 4, 1), "Rank of w_c must be 2, got 3"),
    ("w_c", (6, 4), "w_c.dim_size(0) != input_size + cell_size: 6 vs. 7"),
    ("w_c", (7, 5), "w_c.dim_size(1) != cell_size: 5 vs. 4"),
    ("b_ru", (8, 1), "Rank of b_ru must be 1, got 2"),
    ("b_ru", (9,), "b_ru.dim_size(0) != cell_size * 2: 9 vs. 8"),
    ("b_c", (), "Rank of b_c must be 1, got 0"),
    ("b_c", (3,), "b_c.dim_size(0) != cell_size: 3 vs. 4"),
]
GRADIENT_SHAPES: list[tuple[str, tuple[int, ...], str]] = [
    case
    for name in ("r", "u", "c", "d_h")
    for case in (
        (name, (4,), f"Rank of {'w_c' if name == 'c' else name} must be 2, got 1"),
        (name, (3, 4), f"{name}.dims(0) != batch_size: 3 vs. 2"),
        (name, (2, 5), f"{name}.dims(1) != cell_size: 5 vs. 4"),
    )
]


@pytest.mark.parametrize("good", [CELL, GRADIENT], ids=["cell", "gradient"])
@pytest.mark.parametrize(("name", "shape", "message"), SHAPES)
def test_shapes(good: CellInputs, name: str, shape: tuple[int, ...], message: str) -> None:
    error = refusal_of(replace(good, **{name: zeros(*shape)}))
    assert (error.field, error.message) == (name, message)


@pytest.mark.parametrize(("name", "shape", "message"), GRADIENT_SHAPES)
def test_shapes_of_the_gradient(name: str, shape: tuple[int, ...], message: str) -> None:
    error = refusal_of(replace(GRADIENT, **{name: zeros(*shape)}))
    assert (error.field, error.message) == (name, message)


@pytest.mark.parametrize("good", [CELL, GRADIENT], ids=["cell", "gradient"])
class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "called"), [(np.int32, "int32"), (np.bool_, "bool"), (np.complex64, "complex64")]
    )
    def test_of_x(self, good: CellInputs, dtype: Any, called: str) -> None:
        error = refusal_of(replace(good, x=zeros(2, 3, dtype=dtype)))
        message = f"Value for attr 'T' of {called} is not in the list of allowed values: {TYPES}"
        assert (error.field, error.message) == ("x", message)

    @pytest.mark.parametrize(
        ("dtype", "called"), [(np.float64, "double"), (np.float16, "half"), (ml_dtypes.bfloat16, "bfloat16")]
    )
    def test_of_the_others(self, good: CellInputs, dtype: Any, called: str) -> None:
        for name, array in vars(good).items():
            if name != "x":
                error = refusal_of(replace(good, **{name: array.astype(dtype)}))
                assert (error.field, error.message) == (name, f"{name} must have the dtype of x, float, got {called}")

    def test_come_before_shapes(self, good: CellInputs) -> None:
        assert refusal_of(replace(good, x=zeros(3), b_c=zeros(4, dtype=np.int64))).field == "b_c"


class TestBesideTensorFlow:
    """Every fault alone and every two together."""

    REFUSALS = load_refusals()

    def test_same_error(self) -> None:
        for refusal in self.REFUSALS:
            assert refusal_of(refusal.inputs).message == refusal.text, refusal

    def test_the_field_is_what_the_text_names(self) -> None:
        for refusal in self.REFUSALS:
            field, text = refusal_of(refusal.inputs).field, refusal.text
            named = text.removeprefix("Rank of ").split(" ")[0].split(".")[0].rstrip("_")
            assert field == named or (field, named) == ("c", "w_c"), refusal

    def test_both_ops_and_pairs_are_there(self) -> None:
        def count(kind: type, num_faults: int) -> int:
            return sum(type(r.inputs) is kind and len(r.fault) == num_faults for r in self.REFUSALS)

        assert [count(kind, n) for kind in (CellInputs, GradInputs) for n in (1, 2)] == [22, 200, 38, 649]

    def test_a_refusal_says_what_it_is_about(self) -> None:
        assert str(Refusal({"x": [3]}, CELL, "")) == "forward: x [3]"


class TestTaken:
    @pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 1, 1), (0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
    def test_sizes_and_dtypes(self, dtype: Any, sizes: tuple[int, int, int]) -> None:
        batch, inputs, cells = sizes
        state = (batch, cells)
        planned = plan(cell_inputs(*sizes, dtype))
        assert planned.sizes == Sizes(*sizes)
        assert [(s.dtype, s.shape) for s in planned.output_specs] == [(dtype, state)] * 4
        shapes = [(batch, inputs), state, state, (batch, 2 * cells)]
        planned = plan(gradient_inputs(*sizes, dtype))
        assert planned.sizes == Sizes(*sizes)
        assert [(s.dtype, s.shape) for s in planned.output_specs] == [(dtype, shape) for shape in shapes]

    def test_weight_gradients_are_outputs_when_they_are_wanted(self) -> None:
        planned = plan_gradient(GRADIENT, GradAttributes(weight_gradients=True))
        assert [s.shape for s in planned.output_specs[4:]] == [(7, 8), (7, 4), (8,), (4,)]
